// Backward of the aggregation regulator for one pair, and of the functions that all regulators share.
#pragma once

#include "itm_fast/cpu/regulator_aggregation.h"

namespace itm_fast::ITM_FAST_ISA {

// sums += row.
template <typename T>
ITM_FAST_INLINE void add_row(const T* row, int64_t count, T* sums) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) store<T>(sums + i, load(sums + i) + load(row + i));
  for (; i < count; ++i) sums[i] += row[i];
}

// gradient *= 1 - tanh^2.
template <typename T>
ITM_FAST_INLINE void tanh_backward(const T* tanh, int64_t count, T* gradient) {
  for (int64_t i = 0; i < count; ++i) gradient[i] *= T(1) - tanh[i] * tanh[i];
}

// out = the gradient of v, given that of v / (|v| + 1e-8); `out` may be either. The gradient of a zero vector is zero.
template <typename T>
inline void unit_backward(const T* vector, T norm, int64_t count, const T* gradient, T* out) {
  const T sum = norm + static_cast<T>(kNormEpsilon);
  const T scale = norm == T(0) ? T(0) : T(1) / sum;
  const T along = norm == T(0) ? T(0) : dot(gradient, vector, count) / sum * scale / norm;
  for (int64_t i = 0; i < count; ++i) out[i] = gradient[i] * scale - vector[i] * along;
}

// The same for v = unit * (norm + 1e-8).
template <typename T>
inline void scaled_unit_backward(const T* unit, T norm, int64_t count, const T* gradient, T* out) {
  const T sum = norm + static_cast<T>(kNormEpsilon);
  const T scale = norm == T(0) ? T(0) : T(1) / sum;
  const T along = norm == T(0) ? T(0) : dot(gradient, unit, count) / norm;
  for (int64_t i = 0; i < count; ++i) out[i] = gradient[i] * scale - unit[i] * along;
}

// The gradients of one pair in one step. `guidance` holds that of the next guidance and receives that of the guidance
// before; `aligned` (n_rows) is added to. The others are outputs: of the sums in tanh(B a + beta) and tanh(A g +
// alpha), of v, and of the logits, which hold the weights before.
template <typename T>
struct AggregationGradient {
  T *guidance, *aligned, *local, *guide, *v, *weights;
};

// Backward of aggregate_pair. `weighted`, `factors` and `gathered` are scratch.
template <typename T>
inline void aggregate_pair_backward(const AggregatedPair<T>& pair, const AggregationLayers<T>& layers, int64_t step,
                                    const RegulatorOptions& options, T* weighted, T* factors, T* gathered,
                                    const AggregationGradient<T>& gradient) {
  const int64_t width = layers.b.outputs;
  const CounterDropout& dropout = options.dropout;
  const bool drops = dropout.probability > 0.0;
  weigh_guide(pair, layers, step, dropout, factors, weighted);
  if (options.normalize_guidance) {
    gather(pair, static_cast<const T*>(gradient.weights), width, options.residual_aggregation, gathered);
    unit_backward(static_cast<const T*>(gathered), row_norm(static_cast<const T*>(gathered), width), width,
                  static_cast<const T*>(gradient.guidance), gathered);
  } else {
    __builtin_memcpy(gathered, gradient.guidance, width * sizeof(T));
  }
  if (options.residual_aggregation) {
    for (int64_t i = 0; i < width; ++i) gathered[i] *= T(0.5);
  }
  for (int64_t i = 0; i < width; ++i) {
    gradient.guidance[i] = options.residual_aggregation ? gathered[i] : T(0);
    gradient.v[i] = T(0);
  }
  // Through the weighted sum and the softmax.
  T mean = T(0);
  for (int64_t j = 0; j < pair.n_rows; ++j) {
    mean += gradient.weights[j] * dot(static_cast<const T*>(gathered), pair.aligned + j * pair.aligned_stride, width);
  }
  for (int64_t j = 0; j < pair.n_rows; ++j) {
    const T* aligned = pair.aligned + j * pair.aligned_stride;
    T *out = gradient.aligned + j * pair.aligned_stride, *local = gradient.local + j * pair.local_stride;
    const T weight = gradient.weights[j], along = dot(static_cast<const T*>(gathered), aligned, width);
    const T of_logit = gradient.weights[j] = weight * (along - mean);
    if (drops) dropout_factors(dropout, pair.first_row + j, pair.context, 2 * step, width, factors);
    for (int64_t i = 0; i < width; ++i) {
      out[i] += weight * gathered[i];
      const T factor = drops ? factors[i] : T(1), value = local[i];
      gradient.v[i] += of_logit * value * factor;
      local[i] = of_logit * weighted[i] * factor * (T(1) - value * value);
    }
  }
  // gradient.v is that of the product v * drop(tanh(A g + alpha)) so far.
  if (drops) dropout_factors(dropout, pair.first_row, pair.context, 2 * step + 1, width, factors);
  for (int64_t i = 0; i < width; ++i) {
    const T of_product = gradient.v[i] * (drops ? factors[i] : T(1)), value = pair.guide[i];
    gradient.v[i] = of_product * value;
    gradient.guide[i] = of_product * layers.v[i] * (T(1) - value * value);
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
