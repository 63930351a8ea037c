// Launch of the kernels of cross_attention_scores: grids and workspace. Host code, shared by the launchers and the
// tests.
#pragma once

#include "itm_fast/cuda/long_tiles.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// The tile: 112 rows are the regions of three images, 128 columns about ten captions. The ring of stages takes 60 KB,
// all shared memory 75 KB: two blocks per multiprocessor of compute capability 8.0 or 9.0, one on 8.6 and 8.9.
using ScoreTile112 = ProductTile<112, 128, 2, 4, 4, 256>;

template <typename Tile>
constexpr int64_t kScoreBytes =
    ScoreMemory<Tile>::kBytes > LongMemory<Tile>::kBytes ? ScoreMemory<Tile>::kBytes : LongMemory<Tile>::kBytes;

// Lays out p's workspace, apart from operands, options and scores. It need not be zero.
template <typename Tile, typename S>
void place_scores(ScoreProblem<S>& p, Workspace& workspace, int64_t gram_width = Tile::kRows) {
  place_plan(p.context_tiles, most_tiles(p.contexts.n_sets, p.contexts.n_rows, Tile::kRows), workspace);
  place_plan(p.query_tiles, most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kColumns), workspace);
  p.gram_width = gram_width;
  p.grams = workspace.take<float>(p.contexts.n_rows * gram_width);
  p.query_norms = workspace.take<float>(p.queries.n_rows);
}

template <typename S>
int64_t preparing_blocks(const ScoreProblem<S>& p) {
  return 2 + p.contexts.n_sets + (p.queries.n_rows + kNormRows - 1) / kNormRows;
}
template <typename S>
PreparationOfBoth<S> preparation_of_both(const ScoreProblem<S>& one, const ScoreProblem<S>& other) {
  return {one, other, preparing_blocks(one)};
}
template <typename S>
int64_t preparing_blocks(const PreparationOfBoth<S>& p) {
  return p.blocks_of_one + preparing_blocks(p.other);
}

template <typename S>
int64_t scoring_blocks(const ScoreProblem<S>& p) {
  return p.context_tiles.capacity * p.query_tiles.capacity;
}

// The rows of a slab: `tile`, unless the average set is longer. Only the device knows the longest set, so this allows
// for a quarter more.
template <typename S>
int64_t slab_rows(const SetRows<S>& sets, int64_t tile, int64_t most) {
  if (sets.n_sets == 0 || sets.n_rows <= sets.n_sets * tile) return tile;
  const int64_t average = (sets.n_rows + sets.n_sets - 1) / sets.n_sets, allowed = average + average / 4;
  return gram_stride(static_cast<int>(allowed < most ? allowed : most));
}

// Whether most sets of one side are longer than a tile. The scores then take score_long_tiles.
template <typename Tile, typename S>
bool has_long_sets(const ScoreProblem<S>& p) {
  return slab_rows(p.contexts, Tile::kRows, kMostContexts) > Tile::kRows ||
         slab_rows(p.queries, Tile::kColumns, kMostQueries) > Tile::kColumns;
}

// Lays out the workspace of score_long_tiles for `blocks` blocks.
template <typename Tile, typename S>
void place_long(LongProblem<S>& p, int64_t blocks, Workspace& workspace) {
  p.layout = {slab_rows(p.scoring.contexts, Tile::kRows, kMostContexts),
              slab_rows(p.scoring.queries, Tile::kColumns, kMostQueries)};
  place_scores<Tile>(p.scoring, workspace, p.layout.rows);
  p.slabs = workspace.take<float>(blocks * p.layout.size());
}

}  // namespace itm_fast::cuda
