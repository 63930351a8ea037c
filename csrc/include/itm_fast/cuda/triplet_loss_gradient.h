// triplet_loss and boosting_loss with the gradient of their sum or mean in one launch.
//
// The blocks of the grid are resident together and share the tiles. There are two grid barriers: after the scan of the
// scores, and after the losses of the anchors, when each anchor knows which negatives receive its gradient. So the
// scores are read once, and the gradient is written once. If all negatives take part, the scores are read again for the
// gradient. The gradient is that for an incoming gradient of 1.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/triplet_loss.h"
#include "itm_fast/cuda/triplet_loss_backward.h"

namespace itm_fast::cuda {

template <typename Problem>
struct TripletWithGradient {
  TripletForward<Problem> forward;
  TripletBackward<Problem> backward;
  int32_t* arrived;  // zero: blocks that have reached the grid's barriers
};

// Distributes the anchors of one direction over all blocks.
template <typename Problem, typename Partials, typename Results>
ITM_FAST_DEVICE void finish_shared(const TripletForward<Problem>& p, const Partials& partials, const Results& results,
                                   int64_t tiles, int64_t anchors, int64_t candidates) {
  const int64_t step = block_threads();
  for (int64_t first = block_index() * step; first < anchors; first += grid_blocks() * step) {
    finish_anchors(p, partials, results, tiles, first, smaller(first + step, anchors), anchors, candidates);
  }
}

// Grid: any number of blocks that are resident together.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void triplet_with_gradient(const TripletWithGradient<Problem>& p) {
  const Problem& problem = p.forward.problem;
  const TripletOptions& options = p.forward.options;
  const int64_t row_tiles = tiles_of(problem.rows, Tile::kRows);
  const int64_t column_tiles = tiles_of(problem.columns, Tile::kColumns), tiles = row_tiles * column_tiles;
  for (int64_t tile = block_index(); tile < tiles; tile += grid_blocks()) {
    scan_parts<Problem, Tile>(p.forward, tile / column_tiles, tile % column_tiles);
    barrier();  // All have read what the warps found before the next tile.
  }
  grid_barrier(p.arrived, 1);
  if (options.rows()) {
    finish_shared(p.forward, p.forward.row_partials, p.forward.rows, column_tiles, problem.rows, problem.columns);
  }
  if (options.columns()) {
    finish_shared(p.forward, p.forward.column_partials, p.forward.columns, row_tiles, problem.columns, problem.rows);
  }
  grid_barrier(p.arrived, 2);
  if (block_index() == 0) add_losses<Problem, Tile>(p.forward);
  for (int64_t tile = block_index(); tile < tiles; tile += grid_blocks()) {
    write_gradient_tile<Problem, Tile>(p.backward, tile / column_tiles, tile % column_tiles);
    barrier();  // All have read the counts before the next tile clears them.
  }
  if (leaves_positives(p.backward)) finish_positives(p.backward, grid_blocks());
}

// Multiplies the non-zero elements of a gradient by the incoming gradient; returns at once if that is 1.
template <typename T>
struct GradientScale {
  T* gradient;
  int64_t size;
  const T* factor;
};

template <typename T>
ITM_FAST_DEVICE void scale_gradient(const GradientScale<T>& p) {
  const T factor = *p.factor;
  if (factor == T(1)) return;
  const int64_t step = grid_blocks() * block_threads();
  for (int64_t i = block_index() * block_threads() + thread_index(); i < p.size; i += step) {
    const T value = p.gradient[i];
    if (value != T(0)) p.gradient[i] = value * factor;
  }
}

}  // namespace itm_fast::cuda
