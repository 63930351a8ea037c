// matching_loss on a GPU: two launches. The first is prepare_scores. The second computes all scores, and after a
// barrier of the grid the loss of the scores with its gradient.
#pragma once

#include "itm_fast/cuda/cross_attention.h"
#include "itm_fast/cuda/triplet_loss_gradient.h"

namespace itm_fast::cuda {

template <typename S, typename Problem>
struct MatchingProblem {
  ScoreProblem<S> scoring;
  TripletWithGradient<Problem> loss;  // of scoring.scores
  bool in_large_tiles;                // the loss
  int32_t* scored;                    // zero: blocks that have computed their scores
};

// Grid: any number of blocks that are resident together.
template <int kParts, typename Tile, typename S, typename Problem>
ITM_FAST_DEVICE void matching_loss(const MatchingProblem<S, Problem>& p) {
  static_assert(Tile::kThreads == SmallTile::kThreads && Tile::kThreads == LargeTile::kThreads);
  for (int64_t pair = block_index(); pair < tile_pairs(p.scoring); pair += grid_blocks()) {
    score_tile<kParts, Tile>(p.scoring, pair);
    barrier();  // All have read the shared memory of this pair of tiles.
  }
  grid_barrier(p.scored, 1);
  if (p.in_large_tiles) {
    triplet_with_gradient<Problem, LargeTile>(p.loss);
  } else {
    triplet_with_gradient<Problem, SmallTile>(p.loss);
  }
}

}  // namespace itm_fast::cuda
