// Launch of the kernels of triplet_loss and boosting_loss: grids and workspaces. Host code, shared by the launchers and
// the tests.
#pragma once

#include "itm_fast/cuda/boosting_problem.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/triplet_loss.h"
#include "itm_fast/cuda/triplet_loss_backward.h"
#include "itm_fast/cuda/triplet_loss_gradient.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// Up to this many rows and columns, one launch computes the loss and its gradient.
inline constexpr int64_t kOneLaunchUpTo = 8192;

template <typename Tile>
int64_t blocks_of(int64_t rows, int64_t columns) {
  return tiles_of(rows, Tile::kRows) * tiles_of(columns, Tile::kColumns);
}

constexpr bool uses_large_tiles(int64_t rows, int64_t columns) { return rows * columns > kLargeTilesFrom; }

// Calls body with the tile for a matrix of that size.
template <typename Body>
void with_tile(int64_t rows, int64_t columns, const Body& body) {
  if (uses_large_tiles(rows, columns)) {
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

// Lays out p's workspace, apart from problem, options and results; returns the leading bytes that must be zero. `loss`
// is the first result of the operator, `negatives` the second; both are null for hardest_negatives.
template <typename Tile, typename Problem, typename T = typename Problem::T>
int64_t place_forward(TripletForward<Problem>& p, T* loss, int64_t* negatives, Workspace& workspace) {
  const TripletOptions& options = p.options;
  const int64_t rows = p.problem.rows, columns = p.problem.columns, parts = p.problem.parts();
  const int64_t row_tiles = tiles_of(rows, Tile::kRows), column_tiles = tiles_of(columns, Tile::kColumns);
  p.counters = workspace.take<int32_t>(row_tiles + column_tiles + 1);
  const int64_t zeros = workspace.bytes();
  if (options.rows()) place_partials(p.row_partials, options, parts * column_tiles * rows, workspace);
  if (options.columns()) place_partials(p.column_partials, options, parts * row_tiles * columns, workspace);
  if (p.keeps_hardest) return zeros;
  const bool keeps_each = options.reduction == Reduction::none;
  const int64_t of_rows = options.rows() ? rows : 0, of_columns = options.columns() ? columns : 0;
  T* values = keeps_each ? loss : workspace.take<T>(of_rows + of_columns);
  int64_t* indices = options.mining == Mining::all ? nullptr : negatives;
  p.rows = {values, indices, of_rows + of_columns};
  p.columns = {values + of_rows, indices == nullptr ? nullptr : indices + of_rows, of_rows + of_columns};
  p.loss = keeps_each ? nullptr : loss;
  return zeros;
}

// The same for the backward; its whole workspace must be zero.
template <typename Problem>
void place_backward(TripletBackward<Problem>& p, Workspace& workspace) {
  const bool counts = p.options.needs_sums();
  const int64_t parts = p.problem.parts();
  p.row_counts = counts && p.options.rows() ? workspace.take<int32_t>(parts * p.problem.rows) : nullptr;
  p.column_counts = counts && p.options.columns() ? workspace.take<int32_t>(parts * p.problem.columns) : nullptr;
  p.finished = workspace.take<int32_t>(1);
}

// The same for loss and gradient together; the leading bytes must be zero.
template <typename Tile, typename Problem, typename T = typename Problem::T>
int64_t place_with_gradient(TripletWithGradient<Problem>& p, T* loss, int64_t* negatives, Workspace& workspace) {
  p.arrived = workspace.take<int32_t>(1);
  place_backward(p.backward, workspace);
  const int64_t zeros = place_forward<Tile>(p.forward, loss, negatives, workspace);
  p.backward.negatives = p.forward.options.mining == Mining::all ? nullptr : negatives;
  return zeros;
}

}  // namespace itm_fast::cuda
