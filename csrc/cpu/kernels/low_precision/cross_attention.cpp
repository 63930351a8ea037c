// Products of bfloat16, for the instruction sets that have them.
#include "cpu/kernels/cross_attention.h"

#include "cpu/kernels/product_kernels.h"

namespace itm_fast::ITM_FAST_ISA {

#if defined(ITM_FAST_AMX)
const LowPrecisionProducts kLowPrecisionProducts{ProductsBy<Bf16<1>, float>::kTable, ProductsBy<Bf16<2>, float>::kTable,
                                                 ProductsBy<Bf16<1>, BFloat16>::kTable};
#else
// Three products of AVX-512's twice the rate of float32 would take longer than one of float32.
const LowPrecisionProducts kLowPrecisionProducts{
    ProductsBy<Bf16<1>, float>::kTable, {}, ProductsBy<Bf16<1>, BFloat16>::kTable};
#endif

}  // namespace itm_fast::ITM_FAST_ISA
