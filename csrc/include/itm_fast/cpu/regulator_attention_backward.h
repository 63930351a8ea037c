// Backward of the attention of one slice of a tile.
#pragma once

#include "itm_fast/cpu/cross_attention_dense.h"
#include "itm_fast/cpu/regulator_attention.h"

namespace itm_fast::ITM_FAST_ISA {

// From the gradient of the attended vectors (rows, dim_stride), replaces the raw scores (rows, context_stride) by their
// gradient, and adds to the gradients of the rows' temperatures. `attention` is that of the forward, and the context is
// packed.
template <typename Product, typename Layout>
inline void attend_slice_backward(const typename Product::Value* attended_gradient, const int64_t* first_set,
                                  const int64_t* last_set, int64_t n_contexts, int64_t dim,
                                  const SliceTemperatures<typename Product::Value>& temperatures,
                                  const CrossAttentionOptions& options, const Layout& layout,
                                  typename Product::Value* workspace, const typename Product::Value* attention,
                                  typename Product::Value* raw, typename Product::Value* temperature_gradient) {
  using T = typename Product::Value;
  const int64_t n_rows = *last_set - *first_set, stride = layout.query_stride, row_stride = layout.context_stride;
  T* transposed = workspace + layout.transposed;
  T* normalized = workspace + layout.normalized;
  T* gradients = workspace + layout.score_gradients;
  T* normalized_gradient = workspace + layout.normalized_gradient;
  T* product = workspace + layout.product;
  multiply_packed<Product>(attended_gradient, layout.dim_stride, n_rows, dim, workspace + layout.context_columns,
                           n_contexts, workspace + layout.chunk, product, row_stride);
  transpose_slice(raw, row_stride, n_rows, n_contexts, transposed, stride);
  normalize_slice(transposed, normalized, stride, first_set, last_set, n_contexts, options);

  // Through the softmax over the contexts and the temperatures.
  for (int64_t r = 0; r < n_rows; ++r) {
    const T *p = attention + r * row_stride, *of_attention = product + r * row_stride;
    const T temperature = temperatures.of_row(r), mean = dot(p, of_attention, n_contexts);
    T of_temperature = T(0);
    for (int64_t k = 0; k < n_contexts; ++k) {
      const T of_logit = p[k] * (of_attention[k] - mean);
      of_temperature += of_logit * normalized[k * stride + r];
      normalized_gradient[k * stride + r] = of_logit * temperature;
    }
    temperature_gradient[r] += of_temperature;
  }
  for (int64_t k = 0; k < n_contexts; ++k) {
    T* line = gradients + k * stride;
    for (int64_t r = 0; r < n_rows; ++r) line[r] = T(0);
    for (const int64_t* set = first_set; set < last_set; ++set) {
      const int64_t column = *set - *first_set;
      if (set[0] == set[1]) continue;
      normalize_row_backward(transposed + k * stride + column, normalized + k * stride + column,
                             normalized_gradient + k * stride + column, line + column, set[1] - set[0], options);
    }
    for (int64_t r = 0; r < n_rows; ++r) raw[r * row_stride + k] = line[r];
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
