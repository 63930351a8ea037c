// The attention of one slice of a tile: the query rows, optionally reweighted, over one context set.
#pragma once

#include "itm_fast/cpu/regulator_tile.h"

namespace itm_fast::ITM_FAST_ISA {

// Packs a context set for both products of the attention: with the queries, and with the attention.
template <typename Product>
inline void pack_context(const typename Product::Value* context, int64_t length, int64_t dim,
                         const RegulatorLayout<Product>& layout, typename Product::Value* workspace) {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  constexpr int64_t kColumns = kPanelColumns<T>;
  Cell* line = reinterpret_cast<Cell*>(workspace + layout.line);
  Cell* columns = reinterpret_cast<Cell*>(workspace + layout.context_columns);
  Cell* rows = reinterpret_cast<Cell*>(workspace + layout.context_rows);
  pack_columns<Product>(context, length, dim, packed_size<Product>(length, dim) / Product::kParts, line, columns);
  const int64_t n_cells = Product::cells(length), part = packed_size<Product>(dim, length) / Product::kParts;
  for (int64_t d = 0; d < dim; d += kColumns) {
    Cell* panel = rows + d * n_cells;
    if (d + kColumns <= dim) {
      Product::pack_rows(context + d, dim, length, n_cells, panel, part);
      continue;
    }
    // The last panel is not full: pack one cell at a time, from copies of its rows.
    for (int64_t cell = 0; cell < n_cells; ++cell) {
      T* copy = workspace + layout.line;
      for (int64_t half = 0; half < Product::kNumbers; ++half) {
        const int64_t k = cell * Product::kNumbers + half;
        for (int64_t c = 0; c < kColumns; ++c) {
          copy[half * kColumns + c] = k < length && d + c < dim ? context[k * dim + d + c] : T(0);
        }
      }
      Product::pack_rows(static_cast<const T*>(copy), kColumns, int64_t{Product::kNumbers}, int64_t{1},
                         panel + cell * kColumns, part);
    }
  }
}

// The temperatures of a slice's rows: one per row, or the same for all if `each` is null.
template <typename T>
struct SliceTemperatures {
  const T* each;
  T same;

  ITM_FAST_INLINE Vector<T> at(int64_t column) const { return each == nullptr ? splat(same) : load(each + column); }
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

// attended (rows, dim) = the softmax over `context`, which is packed, of the products with `rows`, normalised over each
// query set's rows. The sets have the offsets `first_set` to `last_set`. A set without rows attends to zero.
template <typename Product>
inline void attend_slice(const typename Product::Value* rows, int64_t row_stride, const int64_t* first_set,
                         const int64_t* last_set, int64_t n_contexts, int64_t dim,
                         const SliceTemperatures<typename Product::Value>& temperatures,
                         const CrossAttentionOptions& options, const RegulatorLayout<Product>& layout,
                         typename Product::Value* workspace, typename Product::Value* attended) {
  using T = typename Product::Value;
  const int64_t n_rows = *last_set - *first_set;
  T* scores = workspace + layout.scores;
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
  multiply_packed<Product>(rows, row_stride, n_rows, dim, workspace + layout.context_columns, n_contexts, chunk, scores,
                           layout.context_stride);
  for (int64_t k = 0; k < n_contexts; ++k) {
    T* line = transposed + k * stride;
    for (int64_t r = 0; r < n_rows; ++r) line[r] = scores[r * layout.context_stride + k];
    for (int64_t r = n_rows; r < stride; ++r) line[r] = T(0);
  }
  for (const int64_t* set = first_set; set < last_set; ++set) {
    if (set[0] == set[1]) continue;
    const int64_t column = *set - *first_set;
    for (int64_t k = 0; k < n_contexts; ++k) {
      divide_row(transposed + k * stride + column, normalized + k * stride + column, set[1] - set[0], options);
    }
  }
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
    for (int64_t k = 0; k < n_contexts; ++k) scores[r * layout.context_stride + k] = normalized[k * stride + r];
  }
  multiply_packed<Product>(scores, layout.context_stride, n_rows, n_contexts, workspace + layout.context_rows, dim,
                           chunk, attended, layout.dim_stride);
}

}  // namespace itm_fast::ITM_FAST_ISA
