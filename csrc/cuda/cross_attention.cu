// The forward of cross_attention_scores on CUDA: one launch prepares operands, one computes all pairs of tiles.
#include <torch/csrc/stable/library.h>

#include <string>
#include <type_traits>

#include "cuda/score_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename S, int kProblems>
using Preparation = std::conditional_t<kProblems == 2, PreparationOfBoth<S>, ScoreProblem<S>>;

// See prepare_scores and score_tile for the grids and for which block writes what.
// Two problems would spill registers with two blocks per multiprocessor.
template <typename S, typename Tile, int kProblems>
__global__ void __launch_bounds__(Tile::kThreads, kProblems == 1 ? blocks_together(kSetParts<S>) : 1)
    prepare_scores_kernel(const __grid_constant__ Preparation<S, kProblems> parameters) {
  prepare_scores<Tile>(parameters);
}

template <typename S, int kParts, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kParts))
    score_tile_kernel(const __grid_constant__ ScoreProblem<S> parameters) {
  score_tile<kParts, Tile>(parameters, block_index());
}

// Scores pass through global memory. Two blocks hide its latency, although threads then spill.
template <typename S, int kParts, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, kFittingBlocks)
    score_long_tiles_kernel(const __grid_constant__ LongProblem<S> parameters) {
  score_long_tiles<kParts, Tile>(parameters);
}

template <typename S, int kParts>
void launch_long(const ScoreProblem<S>& scoring, const SlabLayout& layout, const Tensor& scores) {
  using Tile = ScoreTile112;
  const DeviceStream device(scores);
  LongProblem<S> p{scoring, layout, nullptr};
  const auto score = score_long_tiles_kernel<S, kParts, Tile>;
  const int64_t resident = device.resident_blocks(score, Tile::kThreads, kScoreBytes<Tile>);
  const int64_t blocks = long_blocks<Tile>(scoring, layout, resident);
  Workspace measured;
  place_long<Tile>(p, blocks, measured);
  const Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_long<Tile>(p, blocks, workspace);
  launch_preparation(p.scoring, device);
  device.launch(score, blocks, Tile::kThreads, p, kScoreBytes<Tile>);
}

template <typename S, int kParts>
Tensor forward(const Operand<S>& queries, const Operand<S>& contexts, const CrossAttentionOptions& options,
               const LongestSets& longest) {
  using Tile = ScoreTile112;
  ScoreProblem<S> p = score_problem(queries, contexts, options);
  const int64_t n_queries = p.queries.n_sets, n_contexts = p.contexts.n_sets;
  Tensor scores = torch::stable::new_empty(queries.values, {n_queries, n_contexts}, ScalarType::Float);
  p.scores = mutable_data_of<float>(scores);
  if (n_queries == 0 || n_contexts == 0) return scores;
  const SlabLayout layout = slab_layout<Tile>(p, longest);
  if (has_long_sets<Tile>(layout)) {
    launch_long<S, kParts>(p, layout, scores);
    return scores;
  }
  Workspace measured;
  place_scores<Tile>(p, measured);
  const Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_scores<Tile>(p, workspace);
  const DeviceStream device(scores);
  launch_preparation(p, device);
  device.launch(score_tile_kernel<S, kParts, Tile>, scoring_blocks(p), Tile::kThreads, p, kScoreBytes<Tile>);
  return scores;
}

Tensor cross_attention_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                              const Tensor& context_offsets, double temperature, const std::string& normalization,
                              double negative_slope, const std::string& focal, const std::string& aggregation,
                              double logsumexp_temperature, const std::string& precision, int64_t longest_query,
                              int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_operands(queries, query_offsets, contexts, context_offsets, precision,
                       [&]<typename S, int kParts>(const Operand<S>& of_queries, const Operand<S>& of_contexts,
                                                   std::integral_constant<int, kParts>) {
                         return forward<S, kParts>(of_queries, of_contexts, options, {longest_query, longest_context});
                       });
}

}  // namespace

template <typename S>
void launch_preparation(const ScoreProblem<S>& p, const DeviceStream& device) {
  using Tile = ScoreTile112;
  device.launch(prepare_scores_kernel<S, Tile, 1>, preparing_blocks(p), Tile::kThreads, p, SetTile::kBytes);
}
template void launch_preparation(const ScoreProblem<float>& p, const DeviceStream& device);
template void launch_preparation(const ScoreProblem<BFloat16>& p, const DeviceStream& device);
template void launch_preparation(const ScoreProblem<Half>& p, const DeviceStream& device);

template <typename S>
void launch_preparation(const PreparationOfBoth<S>& p, const DeviceStream& device) {
  using Tile = ScoreTile112;
  device.launch(prepare_scores_kernel<S, Tile, 2>, preparing_blocks(p), Tile::kThreads, p, SetTile::kBytes);
}
template void launch_preparation(const PreparationOfBoth<float>& p, const DeviceStream& device);
template void launch_preparation(const PreparationOfBoth<BFloat16>& p, const DeviceStream& device);
template void launch_preparation(const PreparationOfBoth<Half>& p, const DeviceStream& device);

}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("cross_attention_scores", TORCH_BOX(&itm_fast::cuda::cross_attention_scores));
}
