// Runs the AMX kernels of cross_attention on any processor: compiled with ITM_FAST_AMX_SIMULATED, called by ctypes.
#include <vector>

#include "cpu/kernels/product_kernels.h"
#include "itm_fast/cpu/product.h"

namespace itm_fast::amx {
namespace {

template <int Parts>
void product(const float* rows, int64_t n_rows, const float* columns, int64_t n_columns, int64_t dim, float* out) {
  using Product = Bf16<Parts>;
  const TileLayout<Product> layout(n_rows, n_columns, dim);
  std::vector<float> memory(layout.total, -1e30f);
  auto cells = [&](int64_t offset) { return reinterpret_cast<BFloat16Pair*>(memory.data() + offset); };
  pack_queries<Product>(columns, n_columns, dim, layout.panel_part, cells(layout.line), cells(layout.panels),
                        memory.data() + layout.query_norms);
  float* raw = memory.data() + layout.raw;
  multiply_tile<Product>(rows, dim, n_rows, dim, cells(layout.panels), layout.panel_part, n_columns,
                         cells(layout.context_chunk), raw, layout.stride());
  for (int64_t r = 0; r < n_rows; ++r) {
    for (int64_t c = 0; c < n_columns; ++c) out[r * n_columns + c] = raw[r * layout.stride() + c];
  }
}

template <typename S>
void scores(const ProductKernels<S, float>& table, const S* queries, const int64_t* query_offsets, int64_t n_queries,
            const S* contexts, const int64_t* context_offsets, int64_t n_contexts, int64_t dim, float* out) {
  const FragmentsView<S> query{queries, query_offsets, n_queries, dim};
  const FragmentsView<S> context{contexts, context_offsets, n_contexts, dim};
  const CrossAttentionOptions options{9.0, 0.1, 6.0, Normalization::clipped_l2norm, Focal::none, Aggregation::mean};
  std::vector<float> grams;
  std::vector<int64_t> gram_offsets;
  for (int64_t set = 0; set < n_contexts; ++set) {
    const int64_t length = context.length(set);
    std::vector<float> rows(length * dim), gram(round_up(length, kMicroRows) * length);
    for (int64_t i = 0; i < length * dim; ++i) rows[i] = widen(context.set_values(set)[i]);
    gram_matrix(rows.data(), length, dim, gram.data());
    gram_offsets.push_back(static_cast<int64_t>(grams.size()));
    grams.insert(grams.end(), gram.begin(), gram.end());
  }
  const int64_t max_rows = context_offsets[n_contexts], max_columns = query_offsets[n_queries];
  std::vector<float> workspace(table.tile_workspace(max_rows, max_columns, dim), -1e30f);
  table.pack_queries(query, 0, n_queries, max_rows, max_columns, workspace.data());
  table.score_tile(query, 0, n_queries, context, 0, n_contexts, grams.data(), gram_offsets.data(), options, max_rows,
                   max_columns, workspace.data(), out);
}

template <int Parts>
void rows_product(const float* a, int64_t stride, bool transposed, int64_t n_rows, int64_t depth, const float* b,
                  int64_t dim, float* out) {
  std::vector<float> workspace(RowsProductLayout<Bf16<Parts>>(n_rows).total, -1e30f);
  add_rows_product<Bf16<Parts>>(a, stride, transposed, n_rows, depth, b, dim, dim, n_rows, workspace.data(), out);
}

}  // namespace
}  // namespace itm_fast::amx

extern "C" {

void amx_rows_product(int64_t parts, const float* a, int64_t stride, int64_t transposed, int64_t n_rows, int64_t depth,
                      const float* b, int64_t dim, float* out) {
  (parts == 1 ? itm_fast::amx::rows_product<1> : itm_fast::amx::rows_product<2>)(a, stride, transposed != 0, n_rows,
                                                                                 depth, b, dim, out);
}

void amx_product(int64_t parts, const float* rows, int64_t n_rows, const float* columns, int64_t n_columns, int64_t dim,
                 float* out) {
  (parts == 1 ? itm_fast::amx::product<1> : itm_fast::amx::product<2>)(rows, n_rows, columns, n_columns, dim, out);
}

void amx_scores(int64_t parts, const float* queries, const int64_t* query_offsets, int64_t n_queries,
                const float* contexts, const int64_t* context_offsets, int64_t n_contexts, int64_t dim, float* out) {
  const auto& tables = itm_fast::amx::kLowPrecisionProducts;
  itm_fast::amx::scores(parts == 1 ? tables.bf16 : tables.bf16x3, queries, query_offsets, n_queries, contexts,
                        context_offsets, n_contexts, dim, out);
}

void amx_scores_of_bfloat16(const void* queries, const int64_t* query_offsets, int64_t n_queries, const void* contexts,
                            const int64_t* context_offsets, int64_t n_contexts, int64_t dim, float* out) {
  using itm_fast::BFloat16;
  itm_fast::amx::scores(itm_fast::amx::kLowPrecisionProducts.bf16_of_bf16, static_cast<const BFloat16*>(queries),
                        query_offsets, n_queries, static_cast<const BFloat16*>(contexts), context_offsets, n_contexts,
                        dim, out);
}
}
