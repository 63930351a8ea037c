// matching_loss on CUDA: one launch prepares operands, one computes scores, loss and the gradient of the scores. Both
// directions of attention take the same two launches.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

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

template <int kDirections, typename S, typename Problem>
using Matching = std::conditional_t<kDirections == 2, MatchingOfBoth<S, Problem>, MatchingProblem<S, Problem>>;

// Shared memory holds two blocks of the loss and the scores on compute capabilities 9.x to 11.x; elsewhere a bound
// would only cost registers.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int matching_blocks_together(int) { return 1; }
#else
constexpr int matching_blocks_together(int parts) { return blocks_together(parts); }
#endif

// See matching_loss for the grid.
template <typename Problem, typename S, int kParts, typename Tile, int kDirections>
__global__ void __launch_bounds__(Tile::kThreads, matching_blocks_together(kParts))
    matching_loss_kernel(const __grid_constant__ Matching<kDirections, S, Problem> parameters) {
  matching_loss<kParts, Tile>(parameters);
}

template <int kParts, typename Tile, typename S, typename Problem>
void launch(const MatchingProblem<S, Problem>& p, const DeviceStream& device) {
  launch_preparation(p.scoring, device);
  device.launch_together(matching_loss_kernel<Problem, S, kParts, Tile, 1>, matching_blocks(p), Tile::kThreads, p,
                         kScoreBytes<Tile>);
}
template <int kParts, typename Tile, typename S, typename Problem>
void launch(const MatchingOfBoth<S, Problem>& p, const DeviceStream& device) {
  launch_preparation(preparation_of_both(p.one.scoring, p.other), device);
  device.launch_together(matching_loss_kernel<Problem, S, kParts, Tile, 2>, matching_blocks(p), Tile::kThreads, p,
                         kScoreBytes<Tile>);
}

// The scores of one direction; with both, those of the other, without memory for them, and the factor of their sum.
template <typename S>
struct Scoring {
  ScoreProblem<S> one;
  std::optional<ScoreProblem<S>> other;
  float weight;
};

// `problem` and `options` are those of the loss of `scores`, `negatives` its second result.
template <int kParts, typename S, typename Problem>
Results run(const Scoring<S>& scoring, const Problem& problem, const TripletOptions& options, const Tensor& scores,
            const Tensor& negatives) {
  using Tile = ScoreTile112;
  const int64_t size = scores.size(0);
  Tensor loss = new_loss(options.reduction, options.directions, size, scores);
  Tensor gradient = torch::stable::new_empty(scores, {size, size});
  MatchingProblem<S, Problem> one{};
  one.scoring = scoring.one;
  one.in_large_tiles = uses_large_tiles(size, size);
  one.loss.forward.problem = one.loss.backward.problem = problem;
  one.loss.forward.options = one.loss.backward.options = options;
  one.loss.backward.grad_scores = mutable_data_of<float>(gradient);
  float* loss_value = mutable_data_of<float>(loss);
  int64_t* chosen = mutable_data_of<int64_t>(negatives);
  const auto place_and_launch = [&](auto p) {
    Workspace measured;
    const int64_t zeros = place_matching<Tile>(p, loss_value, chosen, measured);
    const Tensor memory = scratch(scores, measured.bytes());
    Workspace workspace(memory.mutable_data_ptr());
    place_matching<Tile>(p, loss_value, chosen, workspace);
    const DeviceStream device(scores);
    device.set_zero(memory.mutable_data_ptr(), zeros);
    launch<kParts, Tile>(p, device);
  };
  if (scoring.other) {
    MatchingOfBoth<S, Problem> both{one, *scoring.other, scoring.weight};
    both.other.scores = one.loss.backward.grad_scores;
    place_and_launch(both);
  } else {
    place_and_launch(one);
  }
  return {loss, scores, negatives, gradient};
}

Results matching_loss_of(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                         const Tensor& context_offsets, const std::optional<Tensor>& anchor_scores,
                         const std::optional<Tensor>& positives, const std::string& attention, double temperature,
                         const std::string& normalization, double negative_slope, const std::string& focal,
                         const std::string& aggregation, double logsumexp_temperature, const std::string& precision,
                         double other_temperature, const std::string& other_normalization, double other_negative_slope,
                         const std::string& other_focal, const std::string& other_aggregation,
                         double other_logsumexp_temperature, double margin, const std::string& mining, double epsilon,
                         const std::string& selective_divisor, bool halve, const std::string& strategy, double alpha,
                         bool soft, const std::string& directions, const std::string& reduction) {
  const MatchingAttention chosen = matching_attention(attention);
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(query_offsets, context_offsets);
  const CrossAttentionOptions attending =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  const CrossAttentionOptions other_attending =
      cross_attention_options(other_temperature, other_normalization, other_negative_slope, other_focal,
                              other_aggregation, other_logsumexp_temperature);
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
        Scoring<S> scoring{score_problem(of_queries, of_contexts, attending), {}, weight_of_both(chosen)};
        scoring.one.scores = mutable_data_of<float>(scores);
        scoring.one.is_transposed = queries_are_captions(chosen);
        if (has_both_directions(chosen)) scoring.other = score_problem(of_contexts, of_queries, other_attending);
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
