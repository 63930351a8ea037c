// The regulators with products of bfloat16, for the instruction sets that support them.
#include "cpu/kernels/regulators.h"

#include "cpu/kernels/regulators_by.h"

namespace itm_fast::ITM_FAST_ISA {

#if defined(ITM_FAST_AMX)
const LowPrecisionRegulators kLowPrecisionRegulators{RegulatorsBy<Bf16<1>>::kTable, RegulatorsBy<Bf16<2>>::kTable};
#else
// AVX-512 bfloat16 has twice the rate of float32, so three such products would take longer than one of float32.
const LowPrecisionRegulators kLowPrecisionRegulators{RegulatorsBy<Bf16<1>>::kTable, {}};
#endif

}  // namespace itm_fast::ITM_FAST_ISA
