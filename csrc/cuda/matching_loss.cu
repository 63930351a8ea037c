// matching_loss on CUDA: one launch prepares operands, one computes scores, loss and the gradient of the scores.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/boosting_problem.h"
#include "cuda/score_launch.h"
#include "cuda/triplet_problem.h"
#include "itm_fast/cuda/matching_loss_launch.h"
#include "ops/cross_attention.h"
#include "ops/loss_results.h"
#include "ops/matching_loss.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// See matching_loss for the grid.
template <typename Problem, typename S, int kParts, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, blocks_together(kParts))
    matching_loss_kernel(const __grid_constant__ MatchingProblem<S, Problem> parameters) {
  matching_loss<kParts, Tile>(parameters);
}

// `problem` and `options` are those of the loss of `scores`, `negatives` its second result.
template <int kParts, typename S, typename Problem>
Results run(const ScoreProblem<S>& scoring, const Problem& problem, const TripletOptions& options, const Tensor& scores,
            const Tensor& negatives) {
  using Tile = ScoreTile112;
  const int64_t size = scores.size(0);
  Tensor loss = new_loss(options.reduction, options.directions, size, scores);
  Tensor gradient = torch::stable::new_empty(scores, {size, size});
  MatchingProblem<S, Problem> p{};
  p.scoring = scoring;
  p.in_large_tiles = uses_large_tiles(size, size);
  p.loss.forward.problem = p.loss.backward.problem = problem;
  p.loss.forward.options = p.loss.backward.options = options;
  p.loss.backward.grad_scores = mutable_data_of<float>(gradient);
  float* loss_value = mutable_data_of<float>(loss);
  int64_t* chosen = mutable_data_of<int64_t>(negatives);
  Workspace measured;
  const int64_t zeros = place_matching<Tile>(p, loss_value, chosen, measured);
  const Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_matching<Tile>(p, loss_value, chosen, workspace);
  const DeviceStream device(scores);
  device.set_zero(memory.mutable_data_ptr(), zeros);
  launch_preparation(p.scoring, device);
  device.launch_together(matching_loss_kernel<Problem, S, kParts, Tile>, matching_blocks(p), Tile::kThreads, p,
                         kScoreBytes<Tile>);
  return {loss, scores, negatives, gradient};
}

Results matching_loss_of(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                         const Tensor& context_offsets, const std::optional<Tensor>& anchor_scores,
                         const std::optional<Tensor>& positives, const std::string& attention, double temperature,
                         const std::string& normalization, double negative_slope, const std::string& focal,
                         const std::string& aggregation, double logsumexp_temperature, const std::string& precision,
                         double margin, const std::string& mining, double epsilon, const std::string& selective_divisor,
                         bool halve, const std::string& strategy, double alpha, bool soft,
                         const std::string& directions, const std::string& reduction) {
  const bool is_transposed = queries_are_captions(attention);
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(query_offsets, context_offsets);
  const CrossAttentionOptions attending =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_reduced(options.reduction);
  const int64_t size = query_offsets.size(0) - 1;
  check_one_launch(size, size);
  const Tensor scores = torch::stable::new_empty(queries, {size, size}, ScalarType::Float);
  return with_operands(
      queries, query_offsets, contexts, context_offsets, precision,
      [&]<typename S, int kParts>(const Operand<S>& of_queries, const Operand<S>& of_contexts,
                                  std::integral_constant<int, kParts>) -> Results {
        ScoreProblem<S> scoring = score_problem(of_queries, of_contexts, attending);
        scoring.scores = mutable_data_of<float>(scores);
        scoring.is_transposed = is_transposed;
        if (anchor_scores) {
          const BoostingOptions boosting =
              boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
          check_boosting_scores(scores, *anchor_scores, positives);
          const BoostingInputs inputs(scores, *anchor_scores, positives);
          const Tensor negatives =
              new_negatives(boosting.mining, boosting.directions, size, scores, {boosting.n_strategies()});
          return run<kParts>(scoring, inputs.problem<float>(boosting), shared_options(boosting), scores, negatives);
        }
        check_triplet_scores(scores, positives, std::nullopt, options.directions);
        const TripletInputs inputs(scores, positives, std::nullopt);
        const Tensor negatives = new_negatives(options.mining, options.directions, size, scores);
        return run<kParts>(scoring, inputs.problem<float>(), options, scores, negatives);
      });
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) { m.impl("matching_loss", TORCH_BOX(&itm_fast::cuda::matching_loss_of)); }
