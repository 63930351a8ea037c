// The backward of regulated_scores and cross_attention_alignments on CUDA: two launches. It computes in float32 for
// every precision, as on the CPU.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/regulator_operands.h"
#include "itm_fast/cuda/regulation_backward_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// See prepare_backward and differentiate_regulation for the grids and for which block writes what.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    prepare_backward_kernel(const __grid_constant__ RegulationBackward parameters) {
  prepare_backward<Tile>(parameters);
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    differentiate_regulation_kernel(const __grid_constant__ RegulationBackward parameters) {
  differentiate_regulation<Tile>(parameters);
}

// The weights have the order of the call; `gradient` is that of the scores, or with `aligns` of the alignments.
Gradients differentiate(const Call& call, const std::vector<Tensor>& weights, const Tensor& gradient, bool aligns) {
  using Tile = RegulationTile112;
  check_call(call);
  const Tensor incoming = torch::stable::contiguous(torch::stable::to(gradient, ScalarType::Float));
  RegulatorOperands<float> operands(call);
  RegulationBackward p{};
  operands.place(call, p.forward);
  p.gradients = data_of<float>(incoming);
  p.aligns = aligns;
  for (const Tensor& weight : weights) p.n_weights += weight.numel();
  const auto empty = [&](std::vector<int64_t> sizes, ScalarType dtype) {
    return torch::stable::new_empty(call.queries, sizes, dtype);
  };
  Tensor of_queries = empty({call.queries.size(0), p.forward.dim}, ScalarType::Float);
  Tensor of_contexts = empty({call.contexts.size(0), p.forward.dim}, ScalarType::Float);
  Tensor of_weights = empty({p.n_weights}, ScalarType::Float), n_pairs = empty({1}, ScalarType::Long);
  p.query_gradients = mutable_data_of<float>(of_queries);
  p.context_gradients = mutable_data_of<float>(of_contexts);
  p.weight_gradients = mutable_data_of<float>(of_weights);
  p.n_pairs = mutable_data_of<int64_t>(n_pairs);

  const DeviceStream device(call.queries);
  const RegulationSizes sizes{call.weights.width, call.weights.hidden, call.longest, 0};
  Workspace measured;
  place_backward<Tile>(p, sizes, measured);
  const Tensor memory = scratch(call.queries, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  device.set_zero(memory.mutable_data_ptr(), place_backward<Tile>(p, sizes, workspace));
  device.launch(prepare_backward_kernel<Tile>, preparing_blocks(p), Tile::kThreads, p);
  device.launch_together(differentiate_regulation_kernel<Tile>, device.processors(), Tile::kThreads, p,
                         kRegulationBackwardBytes<Tile>);
  return {of_queries, of_contexts, of_weights, n_pairs};
}

Gradients regulated_scores_backward(const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets,
                                    const Tensor& contexts, const Tensor& context_offsets, std::vector<Tensor> weights,
                                    int64_t alignments, int64_t correspondences, int64_t aggregations, bool scored,
                                    bool learned_factors, const std::string& activation, bool normalize_mean,
                                    bool normalize_attended, bool normalize_guidance, const std::string& schedule,
                                    bool residual_correspondence, bool residual_aggregation,
                                    const std::string& correspondence_input, double temperature, double negative_slope,
                                    const std::string& focal, double dropout, std::optional<Tensor> seed,
                                    const std::string& precision, int64_t longest_query, int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_score_gradient(grad_scores, query_offsets, context_offsets);
  const RegulatorSetting setting{alignments,
                                 correspondences,
                                 aggregations,
                                 scored,
                                 learned_factors,
                                 activation,
                                 normalize_mean,
                                 normalize_attended,
                                 normalize_guidance,
                                 schedule,
                                 residual_correspondence,
                                 residual_aggregation,
                                 correspondence_input};
  RegulatorOptions options = regulator_options(
      setting, cross_attention_options(temperature, "clipped_l2norm", negative_slope, focal, "mean", 1.0));
  options.dropout = counter_dropout(dropout, seed, queries);
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  const LongestSets longest{longest_query, longest_context};
  const Call call{queries, query_offsets, contexts, context_offsets, checked, options, seed, precision, longest};
  return differentiate(call, weights, grad_scores, false);
}

Gradients cross_attention_alignments_backward(const Tensor& grad_alignments, const Tensor& queries,
                                              const Tensor& query_offsets, const Tensor& contexts,
                                              const Tensor& context_offsets, std::vector<Tensor> weights,
                                              int64_t correspondences, bool residual_correspondence, double temperature,
                                              const std::string& normalization, double negative_slope,
                                              const std::string& focal, const std::string& precision,
                                              int64_t longest_query, int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const RegulatorOptions options =
      alignment_options(correspondences, residual_correspondence,
                        cross_attention_options(temperature, normalization, negative_slope, focal, "mean", 1.0));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  check_alignment_gradient(grad_alignments, queries, context_offsets, checked);
  const std::optional<Tensor> no_seed;
  const LongestSets longest{longest_query, longest_context};
  const Call call{queries, query_offsets, contexts, context_offsets, checked, options, no_seed, precision, longest};
  return differentiate(call, weights, grad_alignments, true);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("regulated_scores_backward", TORCH_BOX(&itm_fast::cuda::regulated_scores_backward));
  m.impl("cross_attention_alignments_backward", TORCH_BOX(&itm_fast::cuda::cross_attention_alignments_backward));
}
