// The forward of cross_attention_scores on CUDA: one launch prepares operands, one computes all pairs of tiles.
#include <torch/csrc/stable/library.h>

#include <string>

#include "cuda/cross_attention_operands.h"
#include "cuda/launch.h"
#include "itm_fast/cuda/cross_attention_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Products of several parts need more registers per thread than are left with two blocks per multiprocessor.
constexpr int blocks_together(int parts) { return parts == 1 ? 2 : 1; }

// See prepare_scores and score_tile for the grids and for which block writes what.
template <typename S, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kGramParts<S>))
    prepare_scores_kernel(const ScoreProblem<S> parameters) {
  prepare_scores<Tile>(parameters);
}

template <typename S, int kParts, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kParts))
    score_tile_kernel(const __grid_constant__ ScoreProblem<S> parameters) {
  score_tile<kParts, Tile>(parameters);
}

template <typename S, int kParts>
Tensor forward(const Operand<S>& queries, const Operand<S>& contexts, const CrossAttentionOptions& options) {
  using Tile = ScoreTile112;
  ScoreProblem<S> p{};
  p.queries = queries.rows();
  p.contexts = contexts.rows();
  p.dim = queries.values.size(1);
  p.options = PairOptions(options);
  p.is_aligned = rows_are_aligned(p.queries, p.contexts, p.dim);
  const int64_t n_queries = queries.offsets.size(0) - 1, n_contexts = contexts.offsets.size(0) - 1;
  Tensor scores = torch::stable::new_empty(queries.values, {n_queries, n_contexts}, ScalarType::Float);
  p.scores = mutable_data_of<float>(scores);
  if (n_queries == 0 || n_contexts == 0) return scores;
  Workspace measured;
  place_scores<Tile>(p, measured);
  const Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_scores<Tile>(p, workspace);
  const DeviceStream device(scores);
  device.launch(prepare_scores_kernel<S, Tile>, preparing_blocks(p), Tile::kThreads, p, kScoreBytes<Tile>);
  device.launch(score_tile_kernel<S, kParts, Tile>, scoring_blocks(p), Tile::kThreads, p, kScoreBytes<Tile>);
  return scores;
}

Tensor cross_attention_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                              const Tensor& context_offsets, double temperature, const std::string& normalization,
                              double negative_slope, const std::string& focal, const std::string& aggregation,
                              double logsumexp_temperature, const std::string& precision) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_rows(queries.scalar_type(), [&]<typename S>(S) {
    const Operand<S> of_queries(queries, query_offsets), of_contexts(contexts, context_offsets);
    if constexpr (std::is_same_v<S, float>) {
      if (precision == "bf16") return forward<S, 1>(of_queries, of_contexts, options);
      if (precision == "bf16x3") return forward<S, 2>(of_queries, of_contexts, options);
      return forward<S, 3>(of_queries, of_contexts, options);
    } else {
      return forward<S, 1>(of_queries, of_contexts, options);
    }
  });
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("cross_attention_scores", TORCH_BOX(&itm_fast::cuda::cross_attention_scores));
}
