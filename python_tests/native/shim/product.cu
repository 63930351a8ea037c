// Runs the same product kernel with the PTX bodies of the wrappers.
#include "product.h"

template <bool kTransposed, bool kHalf>
__global__ void product_kernel(const itm_fast::cuda::ProductParameters parameters) {
  itm_fast::cuda::product<kTransposed, kHalf>(parameters);
}

template __global__ void product_kernel<false, false>(itm_fast::cuda::ProductParameters);
template __global__ void product_kernel<true, true>(itm_fast::cuda::ProductParameters);
