// Launch of the kernels of cross_attention_scores: grids and workspace. Host code, shared by the launchers and the
// tests.
#pragma once

#include "itm_fast/cuda/cross_attention.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// The tile: 112 rows are the regions of three images, 128 columns about ten captions. The ring of stages takes 60 KB,
// all shared memory 75 KB: two blocks per multiprocessor of compute capability 8.0 or 9.0, one on 8.6 and 8.9.
using ScoreTile112 = ProductTile<112, 128, 2, 4, 4, 256>;

template <typename Tile>
constexpr int64_t kScoreBytes =
    ScoreMemory<Tile>::kBytes > LongMemory<Tile>::kBytes ? ScoreMemory<Tile>::kBytes : LongMemory<Tile>::kBytes;

inline void place_plan(TilePlan& plan, int64_t capacity, Workspace& workspace) {
  plan.capacity = capacity;
  plan.first_set = workspace.take<int64_t>(capacity + 1);
  plan.n_tiles = workspace.take<int64_t>(1);
}

// Lays out p's workspace, apart from operands, options and scores. It need not be zero.
template <typename Tile, typename S>
void place_scores(ScoreProblem<S>& p, Workspace& workspace) {
  place_plan(p.context_tiles, most_tiles(p.contexts.n_sets, p.contexts.n_rows, Tile::kRows), workspace);
  place_plan(p.query_tiles, most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kColumns), workspace);
  p.grams = workspace.take<float>(p.contexts.n_rows * Tile::kRows);
  p.query_norms = workspace.take<float>(p.queries.n_rows);
}

template <typename S>
int64_t preparing_blocks(const ScoreProblem<S>& p) {
  return 2 + p.contexts.n_sets + (p.queries.n_rows + kNormRows - 1) / kNormRows;
}

template <typename S>
int64_t scoring_blocks(const ScoreProblem<S>& p) {
  return p.context_tiles.capacity * p.query_tiles.capacity;
}

}  // namespace itm_fast::cuda
