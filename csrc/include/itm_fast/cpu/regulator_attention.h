// The attention of one slice of a tile: the query rows, optionally reweighted, over one context set.
#pragma once

#include "itm_fast/cpu/regulator_tile.h"

namespace itm_fast::ITM_FAST_ISA {

// Packs a context set for both products of the attention: with the queries, and with the attention.
template <typename Product>
inline void pack_context(const typename Product::Value* context, int64_t length, int64_t dim,
                         const RegulatorLayout<Product>& layout, typename Product::Value* workspace) {
  using Cell = typename Product::Cell;
  pack_columns<Product>(context, length, dim, packed_size<Product>(length, dim) / Product::kParts,
                        reinterpret_cast<Cell*>(workspace + layout.line),
                        reinterpret_cast<Cell*>(workspace + layout.context_columns));
  pack_factor<Product>(context, length, dim, workspace + layout.line, workspace + layout.context_rows);
}

// The temperatures of a slice's rows: one per row, or the same for all if `each` is null.
template <typename T>
struct SliceTemperatures {
  const T* each;
  T same;

  ITM_FAST_INLINE Vector<T> at(int64_t column) const { return each == nullptr ? splat(same) : load(each + column); }
  ITM_FAST_INLINE T of_row(int64_t row) const { return each == nullptr ? same : each[row]; }
};

// normalize_row without a temperature, and with division. The scores of a set's only query are all 1 or -1 up to
// the epsilon; rounding must not make them differ, because focal attention compares them.
template <typename T>
inline void divide_row(const T* raw, T* normalized, int64_t n, const CrossAttentionOptions& options) {
  if (options.normalization == Normalization::softmax) {
    normalize_row(raw, normalized, n, options);
    return;
  }
  const bool clip = is_clipped(options.normalization);
  const T slope = static_cast<T>(options.negative_slope);
  T norm;
  const T denominator = row_denominator(raw, n, options.normalization, clip, slope, norm);
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    store<T>(normalized + j, clipped_scores(raw, j, n, clip, slope) / denominator);
  }
}

// out (n_contexts, stride) = the transposed rows (n_rows, row_stride), padded with zeros.
template <typename T>
inline void transpose_slice(const T* rows, int64_t row_stride, int64_t n_rows, int64_t n_contexts, T* out,
                            int64_t stride) {
  for (int64_t k = 0; k < n_contexts; ++k) {
    T* line = out + k * stride;
    for (int64_t r = 0; r < n_rows; ++r) line[r] = rows[r * row_stride + k];
    for (int64_t r = n_rows; r < stride; ++r) line[r] = T(0);
  }
}

// Normalises the transposed raw scores of a slice over the rows of each query set.
template <typename T>
inline void normalize_slice(const T* raw, T* normalized, int64_t stride, const int64_t* first_set,
                            const int64_t* last_set, int64_t n_contexts, const CrossAttentionOptions& options) {
  for (const int64_t* set = first_set; set < last_set; ++set) {
    if (set[0] == set[1]) continue;
    const int64_t column = *set - *first_set;
    for (int64_t k = 0; k < n_contexts; ++k) {
      divide_row(raw + k * stride + column, normalized + k * stride + column, set[1] - set[0], options);
    }
  }
}

// attended (rows, dim) = the softmax over `context`, which is packed, of the products with `rows`, normalised over each
// query set's rows. The sets have the offsets `first_set` to `last_set`. A set without rows attends to zero. Writes the
// products to `raw` and the softmax to `attention`, both (rows, context_stride); they may be the same array.
template <typename Product>
inline void attend_slice(const typename Product::Value* rows, int64_t row_stride, const int64_t* first_set,
                         const int64_t* last_set, int64_t n_contexts, int64_t dim,
                         const SliceTemperatures<typename Product::Value>& temperatures,
                         const CrossAttentionOptions& options, const RegulatorLayout<Product>& layout,
                         typename Product::Value* workspace, typename Product::Value* raw,
                         typename Product::Value* attention, typename Product::Value* attended) {
  using T = typename Product::Value;
  const int64_t n_rows = *last_set - *first_set;
  T* chunk = workspace + layout.chunk;
  T* transposed = workspace + layout.transposed;
  T* normalized = workspace + layout.normalized;
  const int64_t stride = layout.query_stride;
  if (n_contexts == 0) {
    for (int64_t r = 0; r < n_rows; ++r) {
      for (int64_t d = 0; d < dim; ++d) attended[r * layout.dim_stride + d] = T(0);
    }
    return;
  }
  multiply_packed<Product>(rows, row_stride, n_rows, dim, workspace + layout.context_columns, n_contexts, chunk, raw,
                           layout.context_stride);
  transpose_slice(raw, layout.context_stride, n_rows, n_contexts, transposed, stride);
  normalize_slice(transposed, normalized, stride, first_set, last_set, n_contexts, options);
  for (int64_t column = 0; column < n_rows; column += kLanes<T>) {
    const Vector<T> temperature = temperatures.at(column);
    for (int64_t k = 0; k < n_contexts; ++k) {
      T* place = normalized + k * stride + column;
      store<T>(place, load(place) * temperature);
    }
    const Vector<T> totals = attend_columns(normalized + column, stride, n_contexts, false, options.focal);
    for (int64_t k = 0; k < n_contexts; ++k) {
      T* place = normalized + k * stride + column;
      store<T>(place, load(place) / totals);
    }
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    for (int64_t k = 0; k < n_contexts; ++k) attention[r * layout.context_stride + k] = normalized[k * stride + r];
  }
  multiply_packed<Product>(attention, layout.context_stride, n_rows, n_contexts, workspace + layout.context_rows, dim,
                           chunk, attended, layout.dim_stride);
}

}  // namespace itm_fast::ITM_FAST_ISA
