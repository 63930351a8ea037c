// The two kernels of matching_loss in the shim. The function returns an error message or an empty string.
#include <utility>

#include "itm_fast/cuda/matching_loss_launch.h"
#include "losses.h"

namespace {

// The small tile of cross_attention.cpp.
using SmallScoreTile = ProductTile<48, 64, 2, 4, 3, 40>;

struct Sides {
  int64_t query_rows, context_rows, dim, is_transposed;
  float weight_of_both;  // 0: one direction of attention
};

constexpr CrossAttentionOptions kAttending{
    9.0, 0.1, 6.0, Normalization::clipped_l2norm, Focal::none, Aggregation::mean};
constexpr CrossAttentionOptions kOtherAttending{
    4.0, 0.1, 5.0, Normalization::softmax, Focal::equal, Aggregation::logsumexp};

template <typename Problem>
const ScoreProblem<float>& preparation(const MatchingProblem<float, Problem>& p) {
  return p.scoring;
}
template <typename Problem>
PreparationOfBoth<float> preparation(const MatchingOfBoth<float, Problem>& p) {
  return preparation_of_both(p.one.scoring, p.other);
}

// The two launches of `p`, which lacks its workspace.
template <typename P>
std::string launch(P p, const Settings& s, float* loss, int64_t* negatives) {
  using Tile = SmallScoreTile;
  const auto memory = workspace_of([&](Workspace& w) { return place_matching<Tile>(p, loss, negatives, w); });
  const auto first = preparation(p);
  const std::string found = shim::launch(
      preparing_blocks(first), Tile::kThreads, s.seed, [&] { prepare_scores<Tile>(first); }, SetTile::kBytes);
  if (!found.empty()) return found;
  return shim::launch_together(
      std::min(s.blocks, matching_blocks(p)), Tile::kThreads, s.seed + 1, [&] { matching_loss<3, Tile>(p); },
      kScoreBytes<Tile>);
}

template <typename Problem>
const char* run(const Settings& s, const Sides& sides, const ScoreProblem<float>& scoring, const Problem& problem,
                const TripletOptions& options, float* loss, int64_t* negatives, int64_t n_negatives,
                float* grad_scores) {
  Exact<float> losses(loss, 1), outgoing(grad_scores, s.rows * s.columns);
  Exact<int64_t> indices(negatives, n_negatives);
  MatchingProblem<float, Problem> p{};
  p.scoring = scoring;
  p.scoring.is_transposed = sides.is_transposed != 0;
  p.in_large_tiles = s.large != 0;
  p.loss.forward.problem = p.loss.backward.problem = problem;
  p.loss.forward.options = p.loss.backward.options = options;
  p.loss.backward.grad_scores = outgoing.memory;
  std::string found;
  if (sides.weight_of_both == 0.0f) {
    found = launch(p, s, losses.memory, indices.memory);
  } else {
    MatchingOfBoth<float, Problem> both{p, scoring, sides.weight_of_both};
    std::swap(both.other.queries, both.other.contexts);
    both.other.options = PairOptions(kOtherAttending);
    both.other.scores = outgoing.memory;
    found = launch(both, s, losses.memory, indices.memory);
  }
  *loss = *losses.memory;
  std::copy_n(indices.memory, n_negatives, negatives);
  std::copy_n(outgoing.memory, s.rows * s.columns, grad_scores);
  return report(found);
}

}  // namespace

// The scores, rows and columns as those of the loss, are a result; without anchor scores the loss is triplet_loss.
extern "C" const char* matching(const Settings* s, const Sides* sides, const float* queries,
                                const int64_t* query_offsets, const float* contexts, const int64_t* context_offsets,
                                const float* anchor_scores, const bool* positives, float* scores, float* loss,
                                int64_t* negatives, int64_t n_negatives, float* grad_scores) {
  const Exact<float> query_rows(queries, sides->query_rows * sides->dim);
  const Exact<float> context_rows(contexts, sides->context_rows * sides->dim);
  const Exact<int64_t> of_queries(query_offsets, s->rows + 1), of_contexts(context_offsets, s->rows + 1);
  Exact<float> found(scores, s->rows * s->rows);
  ScoreProblem<float> scoring{};
  scoring.queries = {query_rows.memory, of_queries.memory, true, s->rows, sides->query_rows};
  scoring.contexts = {context_rows.memory, of_contexts.memory, true, s->rows, sides->context_rows};
  scoring.dim = sides->dim;
  scoring.options = PairOptions(kAttending);
  scoring.is_aligned = rows_are_aligned(scoring.queries, scoring.contexts, scoring.dim);
  scoring.scores = found.memory;
  const Exact<float> anchors(anchor_scores, s->rows * s->rows);
  const Exact<bool> mask(positives, s->rows * s->rows);
  const char* problem = nullptr;
  if (anchor_scores != nullptr) {
    const BoostingProblem<float> boosting =
        boosting_problem<float>(found.memory, anchors.memory, mask.memory, s->rows, s->boosting());
    problem =
        run(*s, *sides, scoring, boosting, shared_options(s->boosting()), loss, negatives, n_negatives, grad_scores);
  } else {
    const TripletProblem<float> triplet{found.memory, mask.memory, nullptr, s->rows, s->columns};
    problem = run(*s, *sides, scoring, triplet, s->options(), loss, negatives, n_negatives, grad_scores);
  }
  std::copy_n(found.memory, s->rows * s->rows, scores);
  return problem;
}
