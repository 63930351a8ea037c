// Products that the backward of cross_attention_scores shares among all pairs, used if most pairs have a gradient.
//
// The raw scores of a group of context sets with all queries are one matrix. It is computed tile by tile;
// differentiate_block turns it into its gradient in place. It is then multiplied with the queries and, transposed, with
// the contexts.
#pragma once

#include "itm_fast/cpu/product.h"

namespace itm_fast::ITM_FAST_ISA {

// Scratch memory of add_rows_product for at most `max_rows` rows, in elements of the sums' type.
template <typename Product>
struct RowsProductLayout {
  using T = typename Product::Value;
  static constexpr int64_t kSumsStride = kPanelColumns<T> + kLanes<T>;
  static constexpr int64_t kLineNumbers = kDepth * Product::kNumbers;

  int64_t rows, panel_part;
  int64_t chunk, panel, sums, lines, columns, total;

  explicit RowsProductLayout(int64_t max_rows) {
    rows = round_up(max_rows, Product::kBlockRows);
    panel_part = kDepth * kPanelColumns<T>;
    chunk = 0;
    panel = chunk + Product::kParts * rows * kDepthStride;
    sums = panel + Product::kParts * panel_part;
    lines = sums + Product::kBlockRows * kSumsStride;
    columns = lines + max_rows * kLineNumbers;
    total = columns + kLineNumbers * kPanelColumns<T>;
  }
};

inline constexpr int64_t kTransposedRows = 16;

// out[r][d] += sum_k a[r][k] * b[k][d] for r < n_rows, k < depth, d < dim. a[r][k] is at r * stride + k, or at
// k * stride + r if `transposed`. The rows of `b` are b_stride apart, those of `out` dim.
template <typename Product, typename S>
inline void add_rows_product(const typename Product::Value* a, int64_t stride, bool transposed, int64_t n_rows,
                             int64_t depth, const S* b, int64_t b_stride, int64_t dim, int64_t max_rows,
                             typename Product::Value* workspace, typename Product::Value* out) {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  using Layout = RowsProductLayout<Product>;
  constexpr int64_t kColumns = kPanelColumns<T>;
  [[maybe_unused]] typename Product::Tiles tiles{};
  const Layout layout(max_rows);
  Cell* chunk = reinterpret_cast<Cell*>(workspace + layout.chunk);
  Cell* panel = reinterpret_cast<Cell*>(workspace + layout.panel);
  T* sums = workspace + layout.sums;
  T* lines = workspace + layout.lines;
  const int64_t padded_rows = round_up(n_rows, Product::kBlockRows), chunk_part = layout.rows * kDepthStride;

  for (int64_t begin = 0; begin < depth; begin += Layout::kLineNumbers) {
    const int64_t count = depth - begin < Layout::kLineNumbers ? depth - begin : Layout::kLineNumbers;
    const int64_t n_cells = Product::cells(count);
    // A few rows at a time, so that their cache lines stay in the first-level cache until they are full.
    for (int64_t first = 0; transposed && first < n_rows; first += kTransposedRows) {
      const int64_t last = n_rows - first < kTransposedRows ? n_rows : first + kTransposedRows;
      for (int64_t k = 0; k < count; ++k) {
        const T* source = a + (begin + k) * stride;
        for (int64_t r = first; r < last; ++r) lines[r * Layout::kLineNumbers + k] = source[r];
      }
    }
    for (int64_t r = 0; r < padded_rows; ++r) {
      const int64_t row = r < n_rows ? r : 0;
      const T* line = transposed ? lines + row * Layout::kLineNumbers : a + row * stride + begin;
      Product::to_cells(line, r < n_rows ? count : 0, n_cells, chunk + r * kDepthStride, chunk_part);
    }
    for (int64_t d = 0; d < dim; d += kColumns) {
      const int64_t width = dim - d < kColumns ? dim - d : kColumns;
      if (width == kColumns) {
        Product::pack_rows(b + begin * b_stride + d, b_stride, count, n_cells, panel, layout.panel_part);
      } else {
        T* columns = workspace + layout.columns;
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t c = 0; c < kColumns; ++c) {
            columns[k * kColumns + c] = c < width ? widen(b[(begin + k) * b_stride + d + c]) : T(0);
          }
        }
        Product::pack_rows(static_cast<const T*>(columns), kColumns, count, n_cells, panel, layout.panel_part);
      }
      for (int64_t r = 0; r < padded_rows; r += Product::kBlockRows) {
        const Cell* rows = chunk + r * kDepthStride;
        T* target = out + r * dim + d;
        if (width == kColumns && r + Product::kBlockRows <= n_rows) {
          Product::multiply_block(rows, chunk_part, panel, layout.panel_part, kColumns, n_cells, false, target, dim);
          continue;
        }
        Product::multiply_block(rows, chunk_part, panel, layout.panel_part, width, n_cells, true, sums,
                                Layout::kSumsStride);
        for (int64_t i = 0; i < Product::kBlockRows && r + i < n_rows; ++i) {
          for (int64_t c = 0; c < width; ++c) target[i * dim + c] += sums[i * Layout::kSumsStride + c];
        }
      }
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
