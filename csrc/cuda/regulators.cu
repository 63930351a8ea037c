// regulated_scores and cross_attention_alignments on CUDA: one launch prepares operands, one computes the whole chain.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "cuda/regulator_operands.h"
#include "cuda/score_launch.h"
#include "itm_fast/cuda/regulation_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// See prepare_regulation and regulate_tiles for the grids and for which block writes what.
template <typename S, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kSetParts<S>))
    prepare_regulation_kernel(const __grid_constant__ RegulationProblem<S> parameters) {
  prepare_regulation<Tile>(parameters);
}

template <typename S, int kParts, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, kParts == 1 ? kFittingBlocks : 1)
    regulate_tiles_kernel(const __grid_constant__ RegulationProblem<S> parameters) {
  regulate_tiles<kParts, Tile>(parameters);
}

template <typename S, int kParts>
void run(const Call& call, float* scores, float* alignments) {
  using Tile = RegulationTileOf<kParts>;
  RegulatorOperands<S> operands(call);
  RegulationProblem<S> p{};
  operands.place(call, p);
  p.scores = scores;
  p.alignments = alignments;
  if (p.queries.n_sets == 0 || p.contexts.n_sets == 0) return;
  const DeviceStream device(call.queries);
  const auto regulate = regulate_tiles_kernel<S, kParts, Tile>;
  const int64_t resident = device.resident_blocks(regulate, Tile::kThreads, kRegulationBytes<Tile>);
  const RegulationSizes sizes{call.weights.width, call.weights.hidden, call.longest,
                              regulating_blocks<Tile>(p, resident)};
  Workspace measured;
  const int64_t blocks = place_regulation<kParts, Tile>(p, sizes, measured);
  const Tensor memory = scratch(call.queries, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_regulation<kParts, Tile>(p, sizes, workspace);
  // Multiplies with SetTile, and plans the same tiles of queries as those of the second launch.
  using Preparation = RegulationTile112;
  static_assert(Preparation::kRows == Tile::kRows && Preparation::kWindow == Tile::kWindow);
  device.launch(prepare_regulation_kernel<S, Preparation>, preparing_blocks(p), Preparation::kThreads, p,
                SetTile::kBytes);
  device.launch(regulate, blocks, Tile::kThreads, p, kRegulationBytes<Tile>);
}

void run(const Call& call, float* scores, float* alignments) {
  check_call(call);
  if (call.precision == "bf16") return run<BFloat16, 1>(call, scores, alignments);
  // Two bfloat16 parts hold all digits of float16, too.
  if (call.precision == "bf16x3" || call.precision == "fp16") return run<float, 2>(call, scores, alignments);
  return run<float, 3>(call, scores, alignments);
}

Tensor regulated_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                        const Tensor& context_offsets, std::vector<Tensor> weights, int64_t alignments,
                        int64_t correspondences, int64_t aggregations, bool scored, bool learned_factors,
                        const std::string& activation, bool normalize_mean, bool normalize_attended,
                        bool normalize_guidance, const std::string& schedule, bool residual_correspondence,
                        bool residual_aggregation, const std::string& correspondence_input, double temperature,
                        double negative_slope, const std::string& focal, double dropout, std::optional<Tensor> seed,
                        const std::string& precision, int64_t longest_query, int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  RegulatorOptions options =
      regulator_options({alignments, correspondences, aggregations, scored, learned_factors, activation, normalize_mean,
                         normalize_attended, normalize_guidance, schedule, residual_correspondence,
                         residual_aggregation, correspondence_input},
                        cross_attention_options(temperature, "clipped_l2norm", negative_slope, focal, "mean", 1.0));
  options.dropout = counter_dropout(dropout, seed, queries);
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  Tensor scores =
      torch::stable::new_empty(queries, {query_offsets.size(0) - 1, context_offsets.size(0) - 1}, ScalarType::Float);
  const LongestSets longest{longest_query, longest_context};
  run({queries, query_offsets, contexts, context_offsets, checked, options, seed, precision, longest},
      mutable_data_of<float>(scores), nullptr);
  return scores;
}

Tensor cross_attention_alignments(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                                  const Tensor& context_offsets, std::vector<Tensor> weights, int64_t correspondences,
                                  bool residual_correspondence, double temperature, const std::string& normalization,
                                  double negative_slope, const std::string& focal, const std::string& precision,
                                  int64_t longest_query, int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const RegulatorOptions options =
      alignment_options(correspondences, residual_correspondence,
                        cross_attention_options(temperature, normalization, negative_slope, focal, "mean", 1.0));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  // If the offsets do not end at the number of rows, some rows belong to no set; they stay zero.
  Tensor alignments = torch::stable::new_zeros(queries, {context_offsets.size(0) - 1, queries.size(0), checked.width},
                                               ScalarType::Float);
  const std::optional<Tensor> no_seed;
  const LongestSets longest{longest_query, longest_context};
  run({queries, query_offsets, contexts, context_offsets, checked, options, no_seed, precision, longest}, nullptr,
      mutable_data_of<float>(alignments));
  return alignments;
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("regulated_scores", TORCH_BOX(&itm_fast::cuda::regulated_scores));
  m.impl("cross_attention_alignments", TORCH_BOX(&itm_fast::cuda::cross_attention_alignments));
}
