// Launch of the kernels of matching_loss: grids and workspace. Host code, shared by the launcher and the tests.
#pragma once

#include <algorithm>

#include "itm_fast/cuda/cross_attention_launch.h"
#include "itm_fast/cuda/matching_loss.h"
#include "itm_fast/cuda/triplet_launch.h"

namespace itm_fast::cuda {

// Lays out p's workspace, apart from operands, problem, options and results; the leading bytes that it returns must be
// zero. `loss` and `negatives` as in place_forward.
template <typename Tile, typename S, typename Problem>
int64_t place_matching(MatchingProblem<S, Problem>& p, float* loss, int64_t* negatives, Workspace& workspace) {
  p.scored = workspace.take<int32_t>(1);
  const int64_t zeros = p.in_large_tiles ? place_with_gradient<LargeTile>(p.loss, loss, negatives, workspace)
                                         : place_with_gradient<SmallTile>(p.loss, loss, negatives, workspace);
  place_scores<Tile>(p.scoring, workspace);
  return zeros;
}
template <typename Tile, typename S, typename Problem>
int64_t place_matching(MatchingOfBoth<S, Problem>& p, float* loss, int64_t* negatives, Workspace& workspace) {
  const int64_t zeros = place_matching<Tile>(p.one, loss, negatives, workspace);
  place_scores<Tile>(p.other, workspace);
  return zeros;
}

// The number of blocks that have work in one of the phases.
template <typename S, typename Problem>
int64_t matching_blocks(const MatchingProblem<S, Problem>& p) {
  const int64_t size = p.loss.forward.problem.rows;
  const int64_t tiles = p.in_large_tiles ? blocks_of<LargeTile>(size, size) : blocks_of<SmallTile>(size, size);
  return std::max(scoring_blocks(p.scoring), tiles);
}
template <typename S, typename Problem>
int64_t matching_blocks(const MatchingOfBoth<S, Problem>& p) {
  return std::max(scoring_blocks(p.one.scoring) + scoring_blocks(p.other), matching_blocks(p.one));
}

}  // namespace itm_fast::cuda
