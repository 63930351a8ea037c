// Backward of cross_attention_scores on the CPU, pair by pair.
//
// `differentiate_pair` recomputes one pair of sets and leaves the gradient of its raw scores; the rows of the context
// set and of the query set are then updated by their owners, in a fixed order and without atomics:
//   dX += dS q + h P P' X   and   dQ += dS' x + (through the query's own norm) coefficient * q.
#pragma once

#include "itm_fast/cpu/cross_attention_scores.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename T>
struct PairLayout {
  int64_t stride;       // of the blocks with one row per context
  int64_t gram_stride;  // of blocks with one column per context
  int64_t raw, logits, attention, mixed, transposed, scratch, columns, total;
  static constexpr int64_t kColumnArrays = 8;

  PairLayout(int64_t max_contexts, int64_t max_queries) {
    const int64_t rows = round_up(max_contexts, kMicroRows);
    stride = round_up(max_queries, kPanelColumns<T>) + kLanes<T>;
    gram_stride = round_up(max_contexts, kStripColumns<T>);
    raw = 0;
    logits = raw + rows * stride;
    attention = logits + rows * stride;
    mixed = attention + rows * stride;
    transposed = mixed + rows * stride;
    scratch = transposed + max_queries * gram_stride;
    columns = scratch + max_contexts * kLanes<T>;
    total = columns + kColumnArrays * stride;
  }
};

template <typename T>
ITM_FAST_INLINE T row_norm(const T* row, int64_t dim) {
  Vector<T> sums[4] = {};
  int64_t d = 0;
  for (; d + kStripColumns<T> <= dim; d += kStripColumns<T>) {
    for (int v = 0; v < 4; ++v) sums[v] += load(row + d + v * kLanes<T>) * load(row + d + v * kLanes<T>);
  }
  T total = sum_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; d < dim; ++d) total += row[d] * row[d];
  return std::sqrt(total);
}

// Gradients of one pair for the incoming `gradient` of its score. Writes
//   score_gradient (n_contexts, n_queries): of the raw scores,
//   query_factor (n_queries): what the query row itself is multiplied by,
// and adds to `gram_gradient` (n_contexts rows of gram_stride) what multiplies the context rows.
template <typename T>
inline void differentiate_pair(const T* query, int64_t n_queries, const T* context, int64_t n_contexts, int64_t dim,
                               const T* gram, T gradient, const CrossAttentionOptions& options,
                               const PairLayout<T>& layout, T* workspace, T* score_gradient, T* query_factor,
                               T* gram_gradient) {
  const int64_t stride = layout.stride;
  const int64_t columns = round_up(n_queries, kPanelColumns<T>);
  T* raw = workspace + layout.raw;
  T* logits = workspace + layout.logits;
  T* attention = workspace + layout.attention;
  T* mixed = workspace + layout.mixed;
  T* transposed = workspace + layout.transposed;
  T* __restrict dot = workspace + layout.columns;
  T* __restrict square = dot + stride;
  T* __restrict scale = square + stride;
  T* __restrict cosine = scale + stride;
  T* __restrict cosine_gradient = cosine + stride;
  T* __restrict query_norm = cosine_gradient + stride;
  T* __restrict context_factor = query_norm + stride;
  T* __restrict along = context_factor + stride;

  // Attention, as in the forward, but divided out; `mixed` is G P.
  dot_products(context, n_contexts, query, n_queries, dim, raw, stride);
  for (int64_t k = 0; k < n_contexts; ++k) {
    for (int64_t j = n_queries; j < stride; ++j) raw[k * stride + j] = T(0);
    normalize_row(raw + k * stride, logits + k * stride, n_queries, options);
    for (int64_t j = n_queries; j < columns; ++j) logits[k * stride + j] = T(0);
  }
  __builtin_memcpy(attention, logits, n_contexts * stride * sizeof(T));
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Vector<T> total = attend_columns(attention + c, stride, n_contexts, options.focal);
    for (int64_t k = 0; k < n_contexts; ++k) {
      store<T>(attention + k * stride + c, load(attention + k * stride + c) / total);
    }
  }
  for (int64_t c = 0; c < columns; c += kPanelColumns<T>) {
    for (int64_t r = 0; r < n_contexts; r += kMicroRows) {
      Vector<T> tile[kMicroRows][kPanelVectors] = {};
      multiply_panel(gram + r * n_contexts, n_contexts, attention + c, stride, n_contexts, tile);
#pragma GCC unroll 12
      for (int i = 0; i < kMicroRows; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) store<T>(mixed + (r + i) * stride + c + v * kLanes<T>, tile[i][v]);
      }
    }
  }

  // Cosines.
  for (int64_t j = 0; j < columns; ++j) dot[j] = square[j] = scale[j] = along[j] = cosine_gradient[j] = T(0);
  for (int64_t k = 0; k < n_contexts; ++k) {
    const T* __restrict p = attention + k * stride;
    const T* __restrict s = raw + k * stride;
    const T* __restrict y = mixed + k * stride;
    const T norm = std::sqrt(gram[k * n_contexts + k]);
    for (int64_t j = 0; j < columns; ++j) {
      dot[j] += p[j] * s[j];
      square[j] += p[j] * y[j];
      scale[j] += p[j] * norm;
    }
  }
  for (int64_t j = 0; j < n_queries; ++j) {
    if (square[j] < scale[j] * scale[j] * kCancellation<T>) {
      const Attended<T> exact = attend_exactly(attention + j, stride, context, n_contexts, dim, query + j * dim,
                                               mixed + j, workspace + layout.scratch);
      square[j] = exact.square;
      dot[j] = exact.dot;
    }
    query_norm[j] = row_norm(query + j * dim, dim);
    const T product = query_norm[j] * std::sqrt(square[j]);
    cosine[j] = dot[j] / (product < T(kNormEpsilon) ? T(kNormEpsilon) : product);
  }
  aggregate_backward(cosine, n_queries, gradient, options, cosine_gradient);

  // Through the cosine: `dot` becomes the gradient of the dot product; the factors are the derivatives by |q| and |c|,
  // each divided by that norm, which is what multiplies the vectors q and c themselves.
  for (int64_t j = 0; j < n_queries; ++j) {
    const T norm = std::sqrt(square[j]);
    const T product = query_norm[j] * norm;
    const bool at_least = !(product < T(kNormEpsilon));
    const T denominator = at_least ? product : T(kNormEpsilon);
    const T shared = at_least ? -cosine_gradient[j] * cosine[j] / denominator : T(0);
    dot[j] = cosine_gradient[j] / denominator;
    query_factor[j] = at_least ? shared * norm / query_norm[j] : T(0);
    context_factor[j] = at_least ? shared * query_norm[j] / norm : T(0);
  }
  for (int64_t j = n_queries; j < columns; ++j) dot[j] = context_factor[j] = T(0);

  // Through the softmax over the contexts; `mixed` becomes the gradient of the logits.
  for (int64_t k = 0; k < n_contexts; ++k) {
    const T* __restrict p = attention + k * stride;
    const T* __restrict s = raw + k * stride;
    T* __restrict y = mixed + k * stride;
    for (int64_t j = 0; j < columns; ++j) {
      y[j] = dot[j] * s[j] + context_factor[j] * y[j];
      along[j] += p[j] * y[j];
    }
  }
  for (int64_t k = 0; k < n_contexts; ++k) {
    const T* __restrict p = attention + k * stride;
    T* __restrict y = mixed + k * stride;
    for (int64_t j = 0; j < columns; ++j) y[j] = p[j] * (y[j] - along[j]);
    for (int64_t j = 0; j < n_queries; ++j) {
      score_gradient[k * n_queries + j] = dot[j] * p[j];
      transposed[j * layout.gram_stride + k] = context_factor[j] * p[j];
    }
    normalize_row_backward(raw + k * stride, logits + k * stride, y, score_gradient + k * n_queries, n_queries,
                           options);
  }
  for (int64_t j = 0; j < n_queries; ++j) {
    for (int64_t k = n_contexts; k < layout.gram_stride; ++k) transposed[j * layout.gram_stride + k] = T(0);
  }
  add_product(attention, stride, int64_t{1}, n_contexts, n_queries, transposed, layout.gram_stride, gram_gradient);
}

}  // namespace itm_fast::ITM_FAST_ISA
