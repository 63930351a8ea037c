// Shared by the drivers of the losses: the settings, inputs of exact size, and launches in the shim. Functions return
// an error message or an empty string.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/triplet_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

struct Settings {
  uint64_t seed;
  int64_t large, rows, columns;
  double margin, epsilon;
  int64_t mining, divisor, halve, directions, reduction;
  int64_t strategy, soft;  // of boosting_loss
  double alpha;
  int64_t blocks;  // resident at once

  TripletOptions options() const {
    return {margin,
            epsilon,
            static_cast<Mining>(mining),
            static_cast<SelectiveDivisor>(divisor),
            halve != 0,
            static_cast<Directions>(directions),
            static_cast<Reduction>(reduction)};
  }
  BoostingOptions boosting() const {
    const TripletOptions shared = options();
    return {
        static_cast<Strategy>(strategy), shared.mining, margin, alpha, soft != 0, shared.directions, shared.reduction};
  }
  int64_t anchors() const { return options().rows() ? rows : columns; }
};

template <typename T>
struct Inputs {
  Inputs(const Settings& s, const T* scores, const bool* positives, const T* positive_scores)
      : scores(scores, s.rows * s.columns),
        positives(positives, s.rows * s.columns),
        positive_scores(positive_scores, s.anchors()),
        problem{this->scores.memory, this->positives.memory, this->positive_scores.memory, s.rows, s.columns} {}
  Exact<T> scores;
  Exact<bool> positives;
  Exact<T> positive_scores;
  TripletProblem<T> problem;
};

template <typename T>
struct BoostingInputs {
  BoostingInputs(const Settings& s, const T* scores, const T* anchor_scores, const bool* positives)
      : scores(scores, s.rows * s.rows),
        anchor_scores(anchor_scores, s.rows * s.rows),
        positives(positives, s.rows * s.rows),
        problem(boosting_problem<T>(this->scores.memory, this->anchor_scores.memory, this->positives.memory, s.rows,
                                    s.boosting())) {}
  Exact<T> scores, anchor_scores;
  Exact<bool> positives;
  BoostingProblem<T> problem;
};

template <typename Body>
void with_chosen_tile(int64_t large, const Body& body) {
  large != 0 ? body(LargeTile()) : body(SmallTile());
}

// Memory for a launch, of the exact size of the layout. Only the first `zeros` bytes are zero.
template <typename Place>
std::vector<unsigned char> workspace_of(const Place& place) {
  Workspace measured;
  const int64_t zeros = place(measured);
  std::vector<unsigned char> memory(measured.bytes(), 0xff);
  std::fill_n(memory.begin(), zeros, 0);
  Workspace workspace(memory.data());
  place(workspace);
  return memory;
}

template <typename Problem, typename T = typename Problem::T>
const char* run_forward(const Settings& s, const Problem& problem, const TripletOptions& options, T* loss,
                        int64_t n_losses, int64_t* negatives, int64_t n_negatives) {
  Exact<T> losses(loss, n_losses);
  Exact<int64_t> indices(negatives, n_negatives);
  std::string report_of;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletForward<Problem> p{};
    p.problem = problem;
    p.options = options;
    const auto memory =
        workspace_of([&](Workspace& w) { return place_forward<Tile>(p, losses.memory, indices.memory, w); });
    report_of = shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed,
                             [&] { triplet_forward<Problem, Tile>(p); });
  });
  std::copy_n(losses.memory, n_losses, loss);
  std::copy_n(indices.memory, n_negatives, negatives);
  return report(report_of);
}

template <typename Problem, typename T = typename Problem::T>
const char* run_backward(const Settings& s, const Problem& problem, const TripletOptions& options, const T* grad_loss,
                         int64_t n_losses, const int64_t* negatives, int64_t n_negatives, T* grad_scores,
                         T* grad_positive) {
  const Exact<T> incoming(grad_loss, n_losses);
  const Exact<int64_t> indices(negatives, n_negatives);
  Exact<T> outgoing(grad_scores, s.rows * s.columns), of_positive(grad_positive, s.anchors());
  std::string report_of;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletBackward<Problem> p{};
    p.problem = problem;
    p.options = options;
    p.grad_loss = incoming.memory;
    p.negatives = p.options.mining == Mining::all ? nullptr : indices.memory;
    p.grad_scores = outgoing.memory;
    p.grad_positive = of_positive.memory;
    const auto memory = workspace_of([&](Workspace& w) { return place_backward(p, w), w.bytes(); });
    report_of = shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed,
                             [&] { triplet_backward<Problem, Tile>(p); });
  });
  std::copy_n(outgoing.memory, s.rows * s.columns, grad_scores);
  if (grad_positive != nullptr) std::copy_n(of_positive.memory, s.anchors(), grad_positive);
  return report(report_of);
}

}  // namespace
