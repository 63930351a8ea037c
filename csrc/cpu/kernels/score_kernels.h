// The table of one way of making products: included by kernel files alone.
#pragma once

#include "cpu/kernels/cross_attention.h"
#include "itm_fast/cpu/cross_attention_scores.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename Product, typename S>
struct ScoresBy {
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

  static constexpr ScoreKernels<S, T> kTable{Product::kTileRows, tile_workspace, pack, score};
};

}  // namespace itm_fast::ITM_FAST_ISA
