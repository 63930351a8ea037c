#include "cpu/kernels/regulators.h"

#include "cpu/kernels/regulators_by.h"

namespace itm_fast::ITM_FAST_ISA {

const RegulatorKernels<float> kRegulatorsFloat32 = RegulatorsBy<Exact<float>>::kTable;
const RegulatorKernels<double> kRegulatorsFloat64 = RegulatorsBy<Exact<double>>::kTable;

}  // namespace itm_fast::ITM_FAST_ISA
