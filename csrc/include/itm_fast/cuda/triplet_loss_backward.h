// The gradients of triplet_loss and hardest_negatives on a GPU: one launch each, which writes the dense gradient once.
//
// Every element of the gradient is written by the thread that owns it, from its row's and its column's anchor. What a
// positive receives follows from its anchor alone where each anchor has one negative; where all negatives with an
// active hinge take part, they are counted (whole numbers: their order is of no consequence), and the last block to
// finish turns the counts into the gradients of the positives.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast::cuda {

template <typename T>
struct TripletBackward {
  TripletProblem<T> problem;
  TripletOptions options;
  const T* grad_loss;        // one, or one per direction and anchor for Reduction::none
  const int64_t* negatives;  // of the forward, per direction and anchor; null for Mining::all
  T* grad_scores;            // dense
  T* grad_positive;          // null where the positives stand on the diagonal
  int32_t* row_counts;       // zero, one per row; null where no hinges need to be counted
  int32_t* column_counts;    // the same for columns
  int32_t* finished;         // zero
};

// What one anchor of one direction sends to its negatives.
template <typename T>
struct AnchorGradient {
  T positive = T(0);
  T weight = T(0);        // of its one negative, or of each active hinge
  int64_t negative = -1;  // kAllNegatives: every active hinge

  ITM_FAST_DEVICE bool spreads() const { return negative == kAllNegatives; }
  ITM_FAST_DEVICE bool is_active(const TripletOptions& options, T score) const {
    return hinge(static_cast<T>(options.margin), score, positive) != T(0);
  }
};

template <typename T>
ITM_FAST_DEVICE AnchorGradient<T> anchor_gradient(const TripletBackward<T>& p, bool is_rows, int64_t anchor) {
  const int64_t anchors = is_rows ? p.problem.rows : p.problem.columns;
  const int64_t candidates = is_rows ? p.problem.columns : p.problem.rows;
  const int64_t at = (is_rows || !p.options.rows() ? 0 : anchors) + anchor;
  T scale = p.options.halve ? T(0.5) : T(1);
  if (p.options.reduction == Reduction::mean) scale /= static_cast<T>(anchors);
  AnchorGradient<T> gradient;
  gradient.positive = p.problem.positive(anchor);
  gradient.weight = scale * p.grad_loss[p.options.reduction == Reduction::none ? at : 0];
  gradient.negative = p.negatives == nullptr ? kAllNegatives : p.negatives[at];
  if (p.options.mining == Mining::selective && gradient.spreads()) {
    gradient.weight /= p.problem.divisor(p.options, candidates);
  }
  return gradient;
}

// What the anchor's positive receives; `count` is the number of its active hinges.
template <typename T>
ITM_FAST_DEVICE T positive_gradient(const TripletBackward<T>& p, bool is_rows, int64_t anchor, int32_t count) {
  const AnchorGradient<T> gradient = anchor_gradient(p, is_rows, anchor);
  const int64_t candidates = is_rows ? p.problem.columns : p.problem.rows;
  // A weight that is not finite must not turn a count of 0 into NaN.
  if (gradient.spreads()) return count > 0 ? -gradient.weight * static_cast<T>(count) : T(0);
  if (gradient.negative < 0 || gradient.negative >= candidates) return T(0);
  const int64_t row = is_rows ? anchor : gradient.negative, column = is_rows ? gradient.negative : anchor;
  const T hardest = p.problem.scores[row * p.problem.columns + column];
  return pushes_hardest(p.options, hardest, gradient.positive) ? T(0) : -gradient.weight;
}

// The gradient of the positive of `anchor`, of both directions.
template <typename T>
ITM_FAST_DEVICE void write_positive(const TripletBackward<T>& p, int64_t anchor) {
  T sum = T(0);
  if (p.options.rows()) {
    sum += positive_gradient(p, true, anchor, p.row_counts != nullptr ? load_coherent(p.row_counts + anchor) : 0);
  }
  if (p.options.columns()) {
    sum +=
        positive_gradient(p, false, anchor, p.column_counts != nullptr ? load_coherent(p.column_counts + anchor) : 0);
  }
  if (p.problem.has_diagonal()) {
    p.grad_scores[anchor * p.problem.columns + anchor] = sum;
  } else {
    p.grad_positive[anchor] = sum;
  }
}

// The last block writes what counts decide, and what no tile holds: positives that do not stand on the diagonal.
template <typename T>
ITM_FAST_DEVICE void finish_positives(const TripletBackward<T>& p, int64_t tiles) {
  ITM_FAST_SHARED(int32_t, is_last, 1);
  memory_fence();
  barrier();
  if (thread_index() == 0) is_last[0] = atomic_add(p.finished, 1) == tiles - 1;
  barrier();
  if (is_last[0] == 0) return;
  memory_fence();
  const int64_t anchors = p.options.rows() ? p.problem.rows : p.problem.columns;
  for (int64_t anchor = thread_index(); anchor < anchors; anchor += block_threads()) write_positive(p, anchor);
}

// Grid: one block per tile, those of a strip of rows beside each other.
template <typename T, typename Tile>
ITM_FAST_DEVICE void triplet_backward(const TripletBackward<T>& p) {
  ITM_FAST_SHARED(int32_t, counts, Tile::kColumns);
  const TripletProblem<T>& problem = p.problem;
  const int64_t column_tiles = tiles_of(problem.columns, Tile::kColumns);
  const int64_t first_row = block_index() / column_tiles * Tile::kRows;
  const int64_t first_column = block_index() % column_tiles * Tile::kColumns;
  const bool counted = p.row_counts != nullptr || p.column_counts != nullptr;
  if (p.column_counts != nullptr) {
    for (int c = thread_index(); c < Tile::kColumns; c += Tile::kThreads) counts[c] = 0;
    barrier();
  }

  AnchorGradient<T> of_column[Tile::kColumnsPerLane];
  int32_t column_count[Tile::kColumnsPerLane] = {};
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    const int64_t column = first_column + k * 32 + lane();
    if (p.options.columns() && column < problem.columns) of_column[k] = anchor_gradient(p, false, column);
  }
  for (int r = 0; r < Tile::kRowsPerWarp; ++r) {
    const int64_t row = first_row + warp() * Tile::kRowsPerWarp + r;
    if (row >= problem.rows) break;  // The whole warp leaves.
    AnchorGradient<T> of_row;
    if (p.options.rows()) of_row = anchor_gradient(p, true, row);
    int32_t row_count = 0;
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      const int64_t column = first_column + k * 32 + lane();
      const bool inside = column < problem.columns;
      bool row_active = false;
      if (inside && problem.has_diagonal() && row == column) {
        if (!counted) write_positive(p, row);
      } else if (inside) {
        const bool is_spread = of_row.spreads() || of_column[k].spreads();
        const bool may_be_active = is_spread && problem.is_negative(row, column);
        const T score = may_be_active ? problem.scores[row * problem.columns + column] : T(0);
        row_active = may_be_active && of_row.spreads() && of_row.is_active(p.options, score);
        const bool column_active = may_be_active && of_column[k].spreads() && of_column[k].is_active(p.options, score);
        T gradient = row_active || of_row.negative == column ? of_row.weight : T(0);
        if (column_active || of_column[k].negative == row) gradient += of_column[k].weight;
        p.grad_scores[row * problem.columns + column] = gradient;
        column_count[k] += column_active;
      }
      if (p.row_counts != nullptr) row_count += count_bits(ballot(row_active));
    }
    if (row_count > 0 && lane() == 0) atomic_add(p.row_counts + row, row_count);
  }
  if (p.column_counts != nullptr) {
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      if (column_count[k] > 0) atomic_add(counts, k * 32 + lane(), column_count[k]);
    }
    barrier();
    for (int c = thread_index(); c < Tile::kColumns; c += Tile::kThreads) {
      const int32_t count = counts[c];
      if (count > 0) atomic_add(p.column_counts + first_column + c, count);
    }
  }
  if (counted || !problem.has_diagonal()) {
    finish_positives(p, column_tiles * tiles_of(problem.rows, Tile::kRows));
  }
}

template <typename T>
struct HardestBackward {
  const T *grad_rows, *grad_columns;
  const int64_t *row_indices, *column_indices;
  int64_t size;    // rows and columns
  T* grad_scores;  // dense
};

// Grid: as above.
template <typename T, typename Tile>
ITM_FAST_DEVICE void hardest_backward(const HardestBackward<T>& p) {
  const int64_t column_tiles = tiles_of(p.size, Tile::kColumns);
  const int64_t first_row = block_index() / column_tiles * Tile::kRows;
  const int64_t first_column = block_index() % column_tiles * Tile::kColumns;
  for (int r = 0; r < Tile::kRowsPerWarp; ++r) {
    const int64_t row = first_row + warp() * Tile::kRowsPerWarp + r;
    if (row >= p.size) break;
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      const int64_t column = first_column + k * 32 + lane();
      if (column >= p.size) break;
      T gradient = p.row_indices[row] == column ? p.grad_rows[row] : T(0);
      if (p.column_indices[column] == row) gradient += p.grad_columns[column];
      p.grad_scores[row * p.size + column] = gradient;
    }
  }
}

}  // namespace itm_fast::cuda
