// Products of bfloat16, for the instruction sets that support them.
#include "cpu/kernels/cross_attention.h"

#include "cpu/kernels/product_kernels.h"

namespace itm_fast::ITM_FAST_ISA {

#if defined(ITM_FAST_AMX)
const LowPrecisionProducts kLowPrecisionProducts{ProductsBy<Bf16<1>, float>::kTable, ProductsBy<Bf16<2>, float>::kTable,
                                                 ProductsBy<Bf16<1>, BFloat16>::kTable};
#else
// AVX-512 bfloat16 has twice the rate of float32, so three such products would take longer than one of float32.
const LowPrecisionProducts kLowPrecisionProducts{
    ProductsBy<Bf16<1>, float>::kTable, {}, ProductsBy<Bf16<1>, BFloat16>::kTable};
#endif

}  // namespace itm_fast::ITM_FAST_ISA
