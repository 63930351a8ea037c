// Products of bfloat16, for the instruction sets that support them.
#include "itm_fast/cpu/maxsim.h"

namespace itm_fast::ITM_FAST_ISA {

const LowPrecisionMaxsim kLowPrecisionMaxsim{MaxsimBy<Bf16<1>, float>::kTable, MaxsimBy<Bf16<1>, BFloat16>::kTable};

}  // namespace itm_fast::ITM_FAST_ISA
