// Launch of the kernels of cross_attention_scores: grids and workspace. Host code, shared by the launchers and the
// tests.
#pragma once

#include <algorithm>

#include "itm_fast/cuda/long_tiles.h"
#include "itm_fast/cuda/longest_sets.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// The tile: 112 rows are the regions of three images, 128 columns about ten captions. The ring of stages takes 60 KB,
// all shared memory 77 KB: two blocks per multiprocessor of compute capability 8.0 or 9.0, one on 8.6 and 8.9.
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

// Bytes of the slabs of all blocks, unless that of one block is larger.
inline constexpr int64_t kRoomForSlabs = 520'000'000;

// The slab of a block of score_long_tiles.
template <typename Tile, typename S>
SlabLayout slab_layout(const ScoreProblem<S>& p, const LongestSets& longest) {
  const auto context_rows = [&](int64_t known) { return slab_rows(p.contexts, known, Tile::kRows, kMostContexts); };
  return {context_rows(longest_with_gram(longest.contexts, p.contexts.n_rows, context_rows(0))),
          slab_rows(p.queries, longest.queries, Tile::kColumns, kMostQueries), std::is_same_v<S, float> ? 4 : 6};
}

// Whether a side may have sets that are longer than a tile. The scores then take score_long_tiles.
template <typename Tile>
bool has_long_sets(const SlabLayout& layout) {
  return layout.rows > Tile::kRows || layout.columns > Tile::kColumns;
}

// The blocks of score_long_tiles: as many as there may be pairs of tiles, at most `at_most`, and whose slabs have room.
template <typename Tile, typename S>
int64_t long_blocks(const ScoreProblem<S>& p, const SlabLayout& layout, int64_t at_most) {
  at_most = std::clamp<int64_t>(kRoomForSlabs / (4 * layout.size()), 1, std::max<int64_t>(at_most, 1));
  const int64_t context_tiles = most_tiles(p.contexts.n_sets, p.contexts.n_rows, Tile::kRows);
  return std::min(context_tiles * most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kColumns), at_most);
}

// Lays out the workspace of score_long_tiles for `blocks` blocks with slabs of p.layout.
template <typename Tile, typename S>
void place_long(LongProblem<S>& p, int64_t blocks, Workspace& workspace) {
  place_scores<Tile>(p.scoring, workspace, p.layout.rows);
  p.slabs = workspace.take<float>(blocks * p.layout.size());
}

}  // namespace itm_fast::cuda
