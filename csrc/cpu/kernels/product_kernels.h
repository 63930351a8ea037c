// The kernel table of one way to compute products. Only kernel files include it.
#pragma once

#include "cpu/kernels/cross_attention.h"
#include "itm_fast/cpu/cross_attention_dense.h"
#include "itm_fast/cpu/cross_attention_scores.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename Product, typename S>
struct ProductsBy {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;

  static int64_t tile_workspace(int64_t max_rows, int64_t max_columns, int64_t dim) {
    return TileLayout<Product>(max_rows, max_columns, dim).total;
  }

  static void pack(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query, int64_t max_rows,
                   int64_t max_columns, T* workspace) {
    const TileLayout<Product> layout(max_rows, max_columns, queries.dim);
    const int64_t n_rows = queries.offsets[last_query] - queries.offsets[first_query];
    pack_queries<Product>(queries.set_values(first_query), n_rows, queries.dim, layout.panel_part,
                          reinterpret_cast<Cell*>(workspace + layout.line),
                          reinterpret_cast<Cell*>(workspace + layout.panels), workspace + layout.query_norms);
  }

  static void score(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                    const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context, const T* gram,
                    const int64_t* gram_offsets, const CrossAttentionOptions& options, int64_t max_rows,
                    int64_t max_columns, T* workspace, T* scores) {
    const TileLayout<Product> layout(max_rows, max_columns, queries.dim);
    score_tile(queries, first_query, last_query, contexts, first_context, last_context, gram, gram_offsets, options,
               layout, workspace, scores);
  }

  static void raw_tile(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                       const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context, int64_t max_rows,
                       int64_t max_columns, T* workspace, T* raw, int64_t raw_stride) {
    const TileLayout<Product> layout(max_rows, max_columns, queries.dim);
    const int64_t n_columns = queries.offsets[last_query] - queries.offsets[first_query];
    const int64_t n_rows = contexts.offsets[last_context] - contexts.offsets[first_context];
    T* tile = workspace + layout.raw;
    multiply_tile<Product>(contexts.set_values(first_context), queries.dim, n_rows, queries.dim,
                           reinterpret_cast<const Cell*>(workspace + layout.panels), layout.panel_part, n_columns,
                           reinterpret_cast<Cell*>(workspace + layout.context_chunk), tile, layout.stride());
    for (int64_t r = 0; r < n_rows; ++r) {
      __builtin_memcpy(raw + r * raw_stride, tile + r * layout.stride(), n_columns * sizeof(T));
    }
  }

  static int64_t rows_workspace(int64_t max_rows) { return RowsProductLayout<Product>(max_rows).total; }

  static void add_rows(const T* score_gradients, int64_t stride, bool transposed, int64_t n_rows, int64_t n_factors,
                       const S* factors, int64_t dim, int64_t max_rows, T* workspace, T* gradient) {
    add_rows_product<Product>(score_gradients, stride, transposed, n_rows, n_factors, factors, dim, dim, max_rows,
                              workspace, gradient);
  }

  static constexpr ProductKernels<S, T> kTable{Product::kTileRows, tile_workspace, pack,    score,
                                               raw_tile,           rows_workspace, add_rows};
};

}  // namespace itm_fast::ITM_FAST_ISA
