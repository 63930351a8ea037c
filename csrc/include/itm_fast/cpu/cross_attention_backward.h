// Backward of cross_attention_scores on the CPU.
//
// `differentiate_block` turns the raw scores of one context set with adjacent query sets into their gradient. The owner
// of each context set and query set then updates its rows, in a fixed order and without atomics:
//   dX += dS q + h P P' X   and   dQ += dS' x + (through the query's norm) coefficient * q.
// If few pairs have a gradient, each pair is a separate block (`differentiate_pair`). If most have one, whole rows of
// blocks share their products (cross_attention_dense.h).
#pragma once

#include "itm_fast/cpu/cross_attention_scores.h"

namespace itm_fast::ITM_FAST_ISA {

// A thread's scratch memory in addition to the raw scores, in elements, for sets of at most `max_contexts` rows and
// blocks of at most `max_columns` columns.
template <typename T>
struct BlockLayout {
  int64_t stride;       // of the blocks with one row per context
  int64_t gram_stride;  // of blocks with one column per context
  int64_t logits, attention, mixed, transposed, scratch, columns, gram_gradient, total;
  static constexpr int64_t kColumnArrays = 9;

  BlockLayout(int64_t max_contexts, int64_t max_columns) {
    const int64_t rows = round_up(max_contexts, kMicroRows);
    stride = round_up(max_columns, kPanelColumns<T>) + kLanes<T>;
    gram_stride = round_up(max_contexts, kStripColumns<T>);
    logits = 0;
    attention = logits + rows * stride;
    mixed = attention + rows * stride;
    transposed = mixed + rows * stride;
    scratch = transposed + max_columns * gram_stride;
    columns = scratch + max_contexts * kLanes<T>;
    gram_gradient = columns + kColumnArrays * stride;
    total = gram_gradient + max_contexts * gram_stride;
  }
};

// The query sets of a block: where their columns begin, the first one at 0, and the gradients of their scores.
template <typename T, typename S>
struct QueryBlock {
  const S* values;
  const int64_t* offsets;  // n_sets + 1 of them; columns are counted from the first one
  const T* gradients;      // set i has gradients[i * gradient_stride]
  int64_t gradient_stride;
  int64_t n_sets;

  ITM_FAST_INLINE int64_t first(int64_t set) const { return offsets[set] - offsets[0]; }
  ITM_FAST_INLINE int64_t length(int64_t set) const { return offsets[set + 1] - offsets[set]; }
  ITM_FAST_INLINE T gradient(int64_t set) const { return gradients[set * gradient_stride]; }
  ITM_FAST_INLINE int64_t columns() const { return offsets[n_sets] - offsets[0]; }
};

// From the raw scores (n_contexts, block.columns()), rows `raw_stride` apart and padded to whole panels, computes
//   score_gradient (n_contexts, block.columns()), rows gradient_stride apart: of the raw scores; may be `raw` itself,
//   query_factor (block.columns()): the factor of the query row itself,
// and adds the factors of the context rows to the workspace's gram_gradient (n_contexts, gram_stride). Query sets whose
// score has no gradient get zeros, whatever their values. So do zero rows of either side: they have no direction, and
// their derivative would be 1 / kNormEpsilon.
template <typename T, typename S>
inline void differentiate_block(const QueryBlock<T, S>& block, T* raw, int64_t raw_stride, const S* context,
                                int64_t n_contexts, int64_t dim, const T* gram, const CrossAttentionOptions& options,
                                const BlockLayout<T>& layout, T* workspace, T* score_gradient, int64_t gradient_stride,
                                T* query_factor) {
  const int64_t stride = layout.stride, n_columns = block.columns();
  const int64_t columns = round_up(n_columns, kPanelColumns<T>);
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
  T* __restrict row_gradient = along + stride;

  // Attention as in the forward, but normalised; `mixed` is G P.
  for (int64_t set = 0; set < block.n_sets; ++set) {
    const int64_t first = block.first(set);
    if (block.length(set) == 0) continue;
    normalize_rows(raw + first, raw_stride, logits + first, stride, n_contexts, block.length(set), options);
  }
  for (int64_t k = 0; k < n_contexts; ++k) {
    for (int64_t j = n_columns; j < columns; ++j) logits[k * stride + j] = T(0);
  }
  const bool small_logits = has_small_logits(options);
  __builtin_memcpy(attention, logits, n_contexts * stride * sizeof(T));
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Vector<T> total = attend_columns(attention + c, stride, n_contexts, small_logits, options.focal);
    for (int64_t k = 0; k < n_contexts; ++k) {
      store<T>(attention + k * stride + c, load(attention + k * stride + c) / total);
    }
  }
  for (int64_t c = 0; c < columns; c += kPanelColumns<T>) {
    for (int64_t r = 0; r < n_contexts; r += kMicroRows) {
      Vector<T> tile[kMicroRows][kPanelVectors] = {};
      multiply_panel<T>(gram + r * n_contexts, n_contexts, attention + c, stride, n_contexts, tile);
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
    const T* __restrict s = raw + k * raw_stride;
    const T* __restrict y = mixed + k * stride;
    const T norm = std::sqrt(gram[k * n_contexts + k]);
    for (int64_t j = 0; j < columns; ++j) {
      dot[j] += p[j] * s[j];
      square[j] += p[j] * y[j];
      scale[j] += p[j] * norm;
    }
  }
  for (int64_t j = 0; j < n_columns; ++j) {
    const S* query = block.values + j * dim;
    if (square[j] < scale[j] * scale[j] * kCancellation<T>) {
      const Attended<T> exact =
          attend_exactly(attention + j, stride, context, n_contexts, dim, query, mixed + j, workspace + layout.scratch);
      square[j] = exact.square;
      dot[j] = exact.dot;
    }
    query_norm[j] = row_norm(query, dim);
    const T product = query_norm[j] * std::sqrt(square[j]);
    cosine[j] = dot[j] / (product < T(kNormEpsilon) ? T(kNormEpsilon) : product);
  }
  for (int64_t set = 0; set < block.n_sets; ++set) {
    const int64_t first = block.first(set);
    if (block.length(set) == 0) continue;
    aggregate_backward(cosine + first, block.length(set), block.gradient(set), options, cosine_gradient + first);
  }

  // Through the cosine: `dot` becomes the gradient of the dot product. The factors are the derivatives with respect to
  // |q| and |c|, divided by that norm; they multiply the vectors q and c themselves.
  for (int64_t j = 0; j < n_columns; ++j) {
    const T norm = std::sqrt(square[j]);
    const T product = query_norm[j] * norm;
    const bool at_least = !(product < T(kNormEpsilon));
    const T denominator = at_least ? product : T(kNormEpsilon);
    const T shared = at_least ? -cosine_gradient[j] * cosine[j] / denominator : T(0);
    dot[j] = query_norm[j] == T(0) ? T(0) : cosine_gradient[j] / denominator;
    query_factor[j] = at_least ? shared * norm / query_norm[j] : T(0);
    context_factor[j] = at_least ? shared * query_norm[j] / norm : T(0);
  }
  for (int64_t j = n_columns; j < columns; ++j) dot[j] = context_factor[j] = T(0);
  for (int64_t set = 0; set < block.n_sets; ++set) {
    if (block.gradient(set) != T(0)) continue;
    // Clear them, because even a NaN in them must not reach the sums over the columns.
    for (int64_t j = block.first(set); j < block.first(set) + block.length(set); ++j) {
      dot[j] = query_factor[j] = context_factor[j] = T(0);
      for (int64_t k = 0; k < n_contexts; ++k) attention[k * stride + j] = mixed[k * stride + j] = T(0);
    }
  }

  // Through the softmax over the contexts: `mixed` becomes the gradient of the logits. It is zero for hard attention.
  const bool is_soft = options.focal != Focal::hard;
  for (int64_t k = 0; is_soft && k < n_contexts; ++k) {
    const T* __restrict p = attention + k * stride;
    const T* __restrict s = raw + k * raw_stride;
    T* __restrict y = mixed + k * stride;
    for (int64_t j = 0; j < columns; ++j) {
      y[j] = dot[j] * s[j] + context_factor[j] * y[j];
      along[j] += p[j] * y[j];
    }
  }
  for (int64_t k = 0; k < n_contexts; ++k) {
    T* __restrict p = attention + k * stride;
    T* __restrict y = mixed + k * stride;
    for (int64_t j = 0; is_soft && j < columns; ++j) y[j] = p[j] * (y[j] - along[j]);
    for (int64_t j = 0; j < n_columns; ++j) {
      row_gradient[j] = dot[j] * p[j];
      transposed[j * layout.gram_stride + k] = context_factor[j] * p[j];
    }
    for (int64_t set = 0; set < block.n_sets; ++set) {
      const int64_t first = block.first(set), length = block.length(set);
      if (block.gradient(set) == T(0)) {
        for (int64_t j = first; j < first + length; ++j) row_gradient[j] = T(0);
      } else if (is_soft) {
        normalize_row_backward(raw + k * raw_stride + first, logits + k * stride + first, y + first,
                               row_gradient + first, length, options);
      }
    }
    if (gram[k * n_contexts + k] == T(0)) {
      for (int64_t j = 0; j < n_columns; ++j) row_gradient[j] = p[j] = T(0);
    }
    for (int64_t j = 0; j < n_columns; ++j) {
      score_gradient[k * gradient_stride + j] = query_norm[j] == T(0) ? T(0) : row_gradient[j];
    }
  }
  for (int64_t j = 0; j < n_columns; ++j) {
    for (int64_t k = n_contexts; k < layout.gram_stride; ++k) transposed[j * layout.gram_stride + k] = T(0);
  }
  add_product(attention, stride, int64_t{1}, n_contexts, n_columns, transposed, layout.gram_stride,
              workspace + layout.gram_gradient);
}

}  // namespace itm_fast::ITM_FAST_ISA
