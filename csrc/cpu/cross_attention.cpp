// cross_attention_scores on the CPU: the forward, tile by tile. It computes the Gram matrices or takes prepared ones.
#include "cpu/cross_attention.h"

#include <torch/csrc/stable/library.h>

#include "cpu/matching_parts.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename S, typename T>
Tensor grams_of(const Tensor& contexts, const Operand<S>& context, const std::vector<int64_t>& begins) {
  Tensor grams = torch::stable::new_empty(contexts, {begins.back()}, kScalarType<T>);
  fill_grams(context, begins, static_cast<T*>(grams.mutable_data_ptr()));
  return grams;
}

template <typename S, typename T>
Tensor forward(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
               const Tensor& context_offsets, const Tensor* prepared, const CrossAttentionOptions& options,
               const std::string& precision) {
  const ProductKernels<S, T>& table = product_kernels<S, T>(precision);
  const Operand<S> query(queries, query_offsets), context(contexts, context_offsets);
  Tensor scores = torch::stable::new_empty(queries, {query.view.n_sets, context.view.n_sets}, kScalarType<T>);
  const std::vector<int64_t> begins = gram_offsets(context.view);
  const Tensor kept =
      prepared == nullptr ? grams_of<S, T>(contexts, context, begins) : torch::stable::contiguous(*prepared);
  STD_TORCH_CHECK(kept.size(0) == begins.back(), "grams: expected ", begins.back(), " values for these contexts, got ",
                  kept.size(0));
  const auto* grams = static_cast<const T*>(kept.data_ptr());
  const std::vector<int64_t> columns = cut_into_runs(query.view, 0, query.view.n_sets, kTileColumns);
  const std::vector<int64_t> rows = cut_into_runs(context.view, 0, context.view.n_sets, table.tile_rows);
  const int64_t n_columns = static_cast<int64_t>(columns.size()) - 1, n_rows = static_cast<int64_t>(rows.size()) - 1;
  const int64_t max_rows = std::max(table.tile_rows, context.max_length);
  const int64_t max_columns = std::max(kTileColumns, query.max_length);
  auto* out = static_cast<T*>(scores.mutable_data_ptr());

  // A thread takes adjacent tiles, so that it packs each run of queries once.
  torch::stable::parallel_for(0, n_columns * n_rows, 1, [&](int64_t first, int64_t last) {
    Buffer<T> workspace(table.tile_workspace(max_rows, max_columns, query.view.dim));
    int64_t packed = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t column = tile / n_rows, row = tile % n_rows;
      if (column != packed) {
        table.pack_queries(query.view, columns[column], columns[column + 1], max_rows, max_columns, workspace.data());
        packed = column;
      }
      table.score_tile(query.view, columns[column], columns[column + 1], context.view, rows[row], rows[row + 1], grams,
                       begins.data(), options, max_rows, max_columns, workspace.data(), out);
    }
  });
  return scores;
}

}  // namespace

Tensor cross_attention_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                              const Tensor& context_offsets, double temperature, const std::string& normalization,
                              double negative_slope, const std::string& focal, const std::string& aggregation,
                              double logsumexp_temperature, const std::string& precision, int64_t /*longest_query*/,
                              int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_types(queries.scalar_type(), [&]<typename S, typename T>(S, T) {
    return forward<S, T>(queries, query_offsets, contexts, context_offsets, nullptr, options, precision);
  });
}

namespace {

Tensor cross_attention_scores_prepared(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                                       const Tensor& context_offsets, const Tensor& grams, double temperature,
                                       const std::string& normalization, double negative_slope,
                                       const std::string& focal, const std::string& aggregation,
                                       double logsumexp_temperature, const std::string& precision) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_grams(grams, contexts);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_types(queries.scalar_type(), [&]<typename S, typename T>(S, T) {
    return forward<S, T>(queries, query_offsets, contexts, context_offsets, &grams, options, precision);
  });
}

Tensor cross_attention_grams(const Tensor& contexts, const Tensor& context_offsets) {
  check_contexts(contexts, context_offsets);
  return with_types(contexts.scalar_type(), [&]<typename S, typename T>(S, T) {
    const Operand<S> context(contexts, context_offsets);
    return grams_of<S, T>(contexts, context, gram_offsets(context.view));
  });
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("cross_attention_scores", TORCH_BOX(&itm_fast::cross_attention_scores));
  m.impl("cross_attention_scores_prepared", TORCH_BOX(&itm_fast::cross_attention_scores_prepared));
  m.impl("cross_attention_grams", TORCH_BOX(&itm_fast::cross_attention_grams));
}
