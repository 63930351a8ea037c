// maxsim_scores on CUDA: one launch for listed pairs and two for all pairs; the backward adds one that gathers rows.
#include "ops/maxsim.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/score_launch.h"
#include "itm_fast/cuda/maxsim_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tile = ScoreTile112;

// See the kernel bodies for the grids and for which block writes what.
template <typename S>
__global__ void __launch_bounds__(Tile::kThreads) plan_maxsim_kernel(const MaxsimProblem<S> parameters) {
  plan_maxsim<Tile>(parameters);
}

template <typename S, int kParts>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kParts))
    score_maxsim_kernel(const __grid_constant__ MaxsimProblem<S> parameters) {
  score_maxsim<kParts, Tile>(parameters);
}

template <typename S>
__global__ void __launch_bounds__(kGatherThreads, 4)
    gather_maxsim_kernel(const __grid_constant__ MaxsimGradients<S> parameters) {
  gather_maxsim(parameters);
}

// Without the workspace, and without scores or gradients. `dense_pairs` must live until the launches.
template <typename S>
MaxsimProblem<S> maxsim_problem(const Operand<S>& queries, const Operand<S>& contexts,
                                const std::optional<Tensor>& dense_pairs, const MaxsimOptions& options) {
  MaxsimProblem<S> p{};
  p.queries = queries.rows();
  p.contexts = contexts.rows();
  p.dim = queries.values.size(1);
  p.options = options;
  p.is_aligned = rows_are_aligned(p.queries, p.contexts, p.dim);
  p.is_listed = dense_pairs.has_value();
  p.pairs = data_of<int64_t>(dense_pairs);
  p.n_pairs = dense_pairs.has_value() ? dense_pairs->size(0) : 0;
  return p;
}

std::optional<Tensor> dense(const std::optional<Tensor>& pairs) {
  return pairs.has_value() ? std::optional(torch::stable::contiguous(*pairs)) : std::nullopt;
}

// Whether there is a pair of sets. Pairs are clamped to the sets, so without sets there is none.
template <typename S>
bool has_pairs(const MaxsimProblem<S>& p) {
  return p.queries.n_sets > 0 && p.contexts.n_sets > 0 && (!p.is_listed || p.n_pairs > 0);
}

template <typename S, int kParts>
void launch_maxsim(const MaxsimProblem<S>& p, const DeviceStream& device) {
  if (!p.is_listed) device.launch(plan_maxsim_kernel<S>, 2, Tile::kThreads, p);
  device.launch(score_maxsim_kernel<S, kParts>, maxsim_blocks(p), Tile::kThreads, p, MaxsimMemory<Tile>::kBytes);
}

template <typename S, int kParts>
Tensor forward(const Operand<S>& queries, const Operand<S>& contexts, const std::optional<Tensor>& pairs,
               const MaxsimOptions& options) {
  const std::optional<Tensor> dense_pairs = dense(pairs);
  MaxsimProblem<S> p = maxsim_problem(queries, contexts, dense_pairs, options);
  std::vector<int64_t> shape{p.queries.n_sets, p.contexts.n_sets};
  if (p.is_listed) shape.assign(1, p.n_pairs);
  if (!has_pairs(p)) return torch::stable::new_zeros(queries.values, shape, ScalarType::Float);
  Tensor scores = torch::stable::new_empty(queries.values, shape, ScalarType::Float);
  p.scores = mutable_data_of<float>(scores);
  Workspace measured;
  place_maxsim<Tile>(p, measured);
  const Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_maxsim<Tile>(p, workspace);
  launch_maxsim<S, kParts>(p, DeviceStream(scores));
  return scores;
}

template <typename S, int kParts>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_scores, const Operand<S>& queries, const Operand<S>& contexts,
                                    const std::optional<Tensor>& pairs, const MaxsimOptions& options,
                                    int64_t longest_query, int64_t longest_context, bool for_queries,
                                    bool for_contexts) {
  const Tensor gradients = torch::stable::contiguous(torch::stable::to(grad_scores, ScalarType::Float));
  const std::optional<Tensor> dense_pairs = dense(pairs);
  MaxsimGradients<S> p{};
  p.scoring = maxsim_problem(queries, contexts, dense_pairs, options);
  p.scoring.gradients = data_of<float>(gradients);
  Tensor of_queries =
      torch::stable::new_empty(queries.values, {for_queries ? p.scoring.queries.n_rows : 0, p.scoring.dim});
  Tensor of_contexts =
      torch::stable::new_empty(contexts.values, {for_contexts ? p.scoring.contexts.n_rows : 0, p.scoring.dim});
  p.of_queries = for_queries ? mutable_data_of<S>(of_queries) : nullptr;
  p.of_contexts = for_contexts ? mutable_data_of<S>(of_contexts) : nullptr;
  const DeviceStream device(queries.values);
  Workspace measured;
  place_maxsim_backward<Tile>(p.scoring, longest_query, longest_context, measured);
  const Tensor memory = scratch(queries.values, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_maxsim_backward<Tile>(p.scoring, longest_query, longest_context, workspace);
  if (gathering_blocks(p) == 0) return {of_queries, of_contexts};
  if (has_pairs(p.scoring)) launch_maxsim<S, kParts>(p.scoring, device);
  device.launch(gather_maxsim_kernel<S>, gathering_blocks(p), kGatherThreads, p);
  return {of_queries, of_contexts};
}

// Calls run as with_operands does, after the checks that all of maxsim_scores shares.
template <typename Run>
auto with_maxsim_operands(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                          const Tensor& context_offsets, const std::optional<Tensor>& pairs,
                          const std::string& precision, const Run& run) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(pairs, queries);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(queries.size(0) <= most && contexts.size(0) <= most,
                  "queries, contexts: expected at most 2^31 - 1 rows");
  return with_operands(queries, query_offsets, contexts, context_offsets, precision, run);
}

Tensor maxsim_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                     const Tensor& context_offsets, const std::optional<Tensor>& pairs, const std::string& reduction,
                     const std::string& direction, const std::string& precision) {
  const MaxsimOptions options = maxsim_options(reduction, direction);
  return with_maxsim_operands(queries, query_offsets, contexts, context_offsets, pairs, precision,
                              [&]<typename S, int kParts>(const Operand<S>& of_queries, const Operand<S>& of_contexts,
                                                          std::integral_constant<int, kParts>) {
                                return forward<S, kParts>(of_queries, of_contexts, pairs, options);
                              });
}

std::tuple<Tensor, Tensor> maxsim_scores_backward(const Tensor& grad_scores, const Tensor& queries,
                                                  const Tensor& query_offsets, const Tensor& contexts,
                                                  const Tensor& context_offsets, const std::optional<Tensor>& pairs,
                                                  const std::string& reduction, const std::string& direction,
                                                  const std::string& precision, int64_t longest_query,
                                                  int64_t longest_context, bool for_queries, bool for_contexts) {
  const MaxsimOptions options = maxsim_options(reduction, direction);
  check_pairs(pairs, queries);
  check_maxsim_gradient(grad_scores, queries, query_offsets, context_offsets, pairs);
  return with_maxsim_operands(queries, query_offsets, contexts, context_offsets, pairs, precision,
                              [&]<typename S, int kParts>(const Operand<S>& of_queries, const Operand<S>& of_contexts,
                                                          std::integral_constant<int, kParts>) {
                                return backward<S, kParts>(grad_scores, of_queries, of_contexts, pairs, options,
                                                           longest_query, longest_context, for_queries, for_contexts);
                              });
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("maxsim_scores", TORCH_BOX(&itm_fast::cuda::maxsim_scores));
  m.impl("maxsim_scores_backward", TORCH_BOX(&itm_fast::cuda::maxsim_scores_backward));
}
