// How the kernels of triplet_loss are launched: grids and workspaces. Host code, shared by the launchers and the tests.
#pragma once

#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/triplet_loss.h"
#include "itm_fast/cuda/triplet_loss_backward.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

template <typename Tile>
int64_t blocks_of(int64_t rows, int64_t columns) {
  return tiles_of(rows, Tile::kRows) * tiles_of(columns, Tile::kColumns);
}

// Calls body with the tile for a matrix of that size.
template <typename Body>
void with_tile(int64_t rows, int64_t columns, const Body& body) {
  if (rows * columns > kLargeTilesFrom) {
    body(LargeTile());
  } else {
    body(SmallTile());
  }
}

template <typename T>
void place_partials(TripletPartials<T>& partials, const TripletOptions& options, int64_t size, Workspace& workspace) {
  if (options.needs_sums()) partials.sum = workspace.take<double>(size);
  if (options.needs_hardest()) partials.best = workspace.take<T>(size);
  if (options.needs_hardest()) partials.index = workspace.take<int32_t>(size);
}

// Lays out what p needs beside its problem, options and results; returns the leading bytes that must be zero. `loss` is
// the first result of triplet_loss, `negatives` the second; both are null for hardest_negatives.
template <typename T, typename Tile>
int64_t place_forward(TripletForward<T>& p, T* loss, int64_t* negatives, Workspace& workspace) {
  const TripletOptions& options = p.options;
  const int64_t rows = p.problem.rows, columns = p.problem.columns;
  const int64_t row_tiles = tiles_of(rows, Tile::kRows), column_tiles = tiles_of(columns, Tile::kColumns);
  p.counters = workspace.take<int32_t>(row_tiles + column_tiles + 1);
  const int64_t zeros = workspace.bytes();
  if (options.rows()) place_partials(p.row_partials, options, column_tiles * rows, workspace);
  if (options.columns()) place_partials(p.column_partials, options, row_tiles * columns, workspace);
  if (p.keeps_hardest) return zeros;
  const bool keeps_each = options.reduction == Reduction::none;
  const int64_t of_rows = options.rows() ? rows : 0, of_columns = options.columns() ? columns : 0;
  T* values = keeps_each ? loss : workspace.take<T>(of_rows + of_columns);
  int64_t* indices = options.mining == Mining::all ? nullptr : negatives;
  p.rows = {values, indices};
  p.columns = {values + of_rows, indices == nullptr ? nullptr : indices + of_rows};
  p.loss = keeps_each ? nullptr : loss;
  return zeros;
}

// The same for the backward, whose whole workspace must be zero.
template <typename T>
void place_backward(TripletBackward<T>& p, Workspace& workspace) {
  const bool counts = p.options.needs_sums();
  p.row_counts = counts && p.options.rows() ? workspace.take<int32_t>(p.problem.rows) : nullptr;
  p.column_counts = counts && p.options.columns() ? workspace.take<int32_t>(p.problem.columns) : nullptr;
  p.finished = workspace.take<int32_t>(1);
}

}  // namespace itm_fast::cuda
