#include "itm_fast/cpu/maxsim.h"

namespace itm_fast::ITM_FAST_ISA {

const MaxsimKernels<float, float> kMaxsimFloat32 = MaxsimBy<Exact<float>, float>::kTable;
const MaxsimKernels<double, double> kMaxsimFloat64 = MaxsimBy<Exact<double>, double>::kTable;
const MaxsimKernels<BFloat16, float> kMaxsimBFloat16 = MaxsimBy<Exact<float>, BFloat16>::kTable;

}  // namespace itm_fast::ITM_FAST_ISA
