// matching_loss on a GPU: two launches. The first is prepare_scores, for one direction of attention or for both. The
// second computes all scores, adds those of the second direction, if any, and computes the loss of the scores with its
// gradient. Barriers of the grid separate these steps.
#pragma once

#include "itm_fast/cuda/cross_attention.h"
#include "itm_fast/cuda/triplet_loss_gradient.h"

namespace itm_fast::cuda {

template <typename S, typename Problem>
struct MatchingProblem {
  ScoreProblem<S> scoring;
  TripletWithGradient<Problem> loss;  // of scoring.scores
  bool in_large_tiles;                // the loss
  int32_t* scored;                    // zero: blocks that have reached the grid's barriers before the loss
};

// The same with a second direction, in which the contexts of the first attend to its queries. Its scores are written to
// the memory of the gradient, which is free until the loss.
template <typename S, typename Problem>
struct MatchingOfBoth {
  MatchingProblem<S, Problem> one;
  ScoreProblem<S> other;
  float weight;  // of the sum of both scores
};

// The scores of every pair of tiles from `first` on, in steps of the grid.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_pairs(const ScoreProblem<S>& p, int64_t first) {
  for (int64_t pair = first; pair < tile_pairs(p); pair += grid_blocks()) {
    score_tile<kParts, Tile>(p, pair);
    barrier();  // All have read the shared memory of this pair of tiles.
  }
}

template <typename Tile, typename S, typename Problem>
ITM_FAST_DEVICE void loss_of_scores(const MatchingProblem<S, Problem>& p) {
  static_assert(Tile::kThreads == SmallTile::kThreads && Tile::kThreads == LargeTile::kThreads);
  if (p.in_large_tiles) {
    triplet_with_gradient<Problem, LargeTile>(p.loss);
  } else {
    triplet_with_gradient<Problem, SmallTile>(p.loss);
  }
}

// Grid: any number of blocks that are resident together.
template <int kParts, typename Tile, typename S, typename Problem>
ITM_FAST_DEVICE void matching_loss(const MatchingProblem<S, Problem>& p) {
  score_pairs<kParts, Tile>(p.scoring, block_index());
  grid_barrier(p.scored, 1);
  loss_of_scores<Tile>(p);
}

// The same for both directions. The first pair of tiles of the second direction goes to the block after that of the
// last pair of the first direction, so no block waits for the other direction.
template <int kParts, typename Tile, typename S, typename Problem>
ITM_FAST_DEVICE void matching_loss(const MatchingOfBoth<S, Problem>& p) {
  score_pairs<kParts, Tile>(p.one.scoring, block_index());
  const int64_t blocks = grid_blocks(), next = tile_pairs(p.one.scoring) % blocks;
  score_pairs<kParts, Tile>(p.other, (block_index() + blocks - next) % blocks);
  grid_barrier(p.one.scored, 1);
  const int64_t n_scores = p.other.queries.n_sets * p.other.contexts.n_sets, threads = block_threads();
  for (int64_t i = block_index() * threads + thread_index(); i < n_scores; i += blocks * threads) {
    p.one.scoring.scores[i] = p.weight * (load_coherent(p.one.scoring.scores + i) + load_coherent(p.other.scores + i));
  }
  grid_barrier(p.one.scored, 2);
  loss_of_scores<Tile>(p.one);
}

}  // namespace itm_fast::cuda
