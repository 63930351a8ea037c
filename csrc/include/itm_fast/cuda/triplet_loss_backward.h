// The gradients of triplet_loss, boosting_loss and hardest_negatives on a GPU: one launch each, which writes the dense
// gradient once.
//
// The thread that owns an element of the gradient writes it, from its row's and its column's anchor. If each anchor has
// one negative, the gradient of a positive depends only on its anchor. If all negatives with an active hinge take part,
// they are counted (whole numbers, so their order does not matter), and the last block to finish turns the counts into
// the gradients of the positives.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast::cuda {

template <typename Problem>
struct TripletBackward {
  using T = typename Problem::T;
  Problem problem;
  TripletOptions options;
  const T* grad_loss;        // one, or one per direction and anchor for Reduction::none; null: 1
  const int64_t* negatives;  // of the forward, per part, direction and anchor; null for Mining::all
  T* grad_scores;            // dense
  T* grad_positive;          // null if the positives are on the diagonal
  int32_t* row_counts;       // zero, one per part and row; null if no hinges are counted
  int32_t* column_counts;    // the same for columns
  int32_t* finished;         // zero
};

// The gradient that an anchor of one direction sends to its negatives, and the values for its keys and hinges.
template <typename T>
struct AnchorGradient {
  T positive = T(0), margin = T(0), own = T(0);
  T weight = T(0);        // of its one negative, or of each active hinge
  int64_t negative = -1;  // kAllNegatives: every active hinge

  ITM_FAST_DEVICE bool spreads() const { return negative == kAllNegatives; }
  ITM_FAST_DEVICE bool is_active(T key) const { return hinge(margin, key, positive) != T(0); }
};

template <typename Problem, typename T = typename Problem::T>
ITM_FAST_DEVICE AnchorGradient<T> anchor_gradient(const TripletBackward<Problem>& p, int part, bool is_rows,
                                                  int64_t anchor) {
  const int64_t anchors = is_rows ? p.problem.rows : p.problem.columns;
  const int64_t candidates = is_rows ? p.problem.columns : p.problem.rows;
  const int64_t at = (is_rows || !p.options.rows() ? 0 : anchors) + anchor;
  const int64_t directions = p.options.directions == Directions::both ? 2 : 1;
  T scale = p.options.halve ? T(0.5) : T(1);
  if (p.options.reduction == Reduction::mean) scale /= static_cast<T>(anchors);
  if (p.grad_loss != nullptr) scale *= p.grad_loss[p.options.reduction == Reduction::none ? at : 0];
  AnchorGradient<T> gradient;
  gradient.weight = scale;
  gradient.negative = p.negatives == nullptr ? kAllNegatives : p.negatives[part * directions * anchors + at];
  gradient.positive = p.problem.positive(part, anchor);
  gradient.margin = p.problem.margin(part, p.options);
  gradient.own = p.problem.own(part, anchor);
  if (p.options.mining == Mining::selective && gradient.spreads()) {
    gradient.weight /= p.problem.divisor(p.options, candidates);
  }
  return gradient;
}

// The gradient of the anchor's positive. `count` is the number of its active hinges or, if the positive has its own
// term, of its negatives.
template <typename Problem, typename T = typename Problem::T>
ITM_FAST_DEVICE T positive_gradient(const TripletBackward<Problem>& p, int part, bool is_rows, int64_t anchor,
                                    int32_t count) {
  const AnchorGradient<T> gradient = anchor_gradient(p, part, is_rows, anchor);
  const int64_t candidates = is_rows ? p.problem.columns : p.problem.rows;
  const bool own_term = p.problem.has_positive_term(part);
  if (own_term && p.problem.positive_term(part, anchor) == T(0)) return T(0);
  // A non-finite weight must not turn a count of 0 into NaN.
  if (gradient.spreads()) return count > 0 ? -gradient.weight * static_cast<T>(count) : T(0);
  if (own_term) return -gradient.weight;
  if (gradient.negative < 0 || gradient.negative >= candidates) return T(0);
  const int64_t row = is_rows ? anchor : gradient.negative, column = is_rows ? gradient.negative : anchor;
  const T hardest = p.problem.scores[row * p.problem.columns + column];
  return pushes_hardest(p.options, hardest, gradient.positive) ? T(0) : -gradient.weight;
}

// The gradient of the positive of `anchor`, over all parts and both directions.
template <typename Problem>
ITM_FAST_DEVICE void write_positive(const TripletBackward<Problem>& p, int64_t anchor) {
  typename Problem::T sum = 0;
  for (int part = 0; part < p.problem.parts(); ++part) {
    if (p.options.rows()) {
      const int64_t at = part * p.problem.rows + anchor;
      sum += positive_gradient(p, part, true, anchor, p.row_counts != nullptr ? load_coherent(p.row_counts + at) : 0);
    }
    if (p.options.columns()) {
      const int64_t at = part * p.problem.columns + anchor;
      const int32_t count = p.column_counts != nullptr ? load_coherent(p.column_counts + at) : 0;
      sum += positive_gradient(p, part, false, anchor, count);
    }
  }
  if (p.problem.has_diagonal()) {
    p.grad_scores[anchor * p.problem.columns + anchor] = sum;
  } else {
    p.grad_positive[anchor] = sum;
  }
}

// The last of `blocks` blocks writes the gradients that depend on counts, and those outside of the tiles: positives
// that are not on the diagonal.
template <typename Problem>
ITM_FAST_DEVICE void finish_positives(const TripletBackward<Problem>& p, int64_t blocks) {
  ITM_FAST_SHARED(int32_t, is_last, 1);
  memory_fence();
  barrier();
  if (thread_index() == 0) is_last[0] = atomic_add(p.finished, 1) == blocks - 1;
  barrier();
  if (is_last[0] == 0) return;
  memory_fence();
  const int64_t anchors = p.options.rows() ? p.problem.rows : p.problem.columns;
  for (int64_t anchor = thread_index(); anchor < anchors; anchor += block_threads()) write_positive(p, anchor);
}

// Whether finish_positives has work to do.
template <typename Problem>
ITM_FAST_DEVICE bool leaves_positives(const TripletBackward<Problem>& p) {
  return p.row_counts != nullptr || p.column_counts != nullptr || !p.problem.has_diagonal();
}

// Writes one tile of the gradient, except positives that finish_positives writes.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void write_gradient_tile(const TripletBackward<Problem>& p, int64_t row_tile, int64_t column_tile) {
  using T = typename Problem::T;
  constexpr int kParts = Problem::kMaxParts;
  ITM_FAST_SHARED(int32_t, counts, kParts* Tile::kColumns);
  const Problem& problem = p.problem;
  const int64_t first_row = row_tile * Tile::kRows, first_column = column_tile * Tile::kColumns;
  const bool counted = p.row_counts != nullptr || p.column_counts != nullptr;
  if (p.column_counts != nullptr) {
    for (int c = thread_index(); c < kParts * Tile::kColumns; c += Tile::kThreads) counts[c] = 0;
    barrier();
  }

  AnchorGradient<T> of_column[Tile::kColumnsPerLane][kParts];
  int32_t column_count[Tile::kColumnsPerLane][kParts] = {};
  ITM_FAST_UNROLLED
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    const int64_t column = first_column + k * 32 + lane();
    if (!p.options.columns() || column >= problem.columns) continue;
    ITM_FAST_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      if (part < problem.parts()) of_column[k][part] = anchor_gradient(p, part, false, column);
    }
  }
  for (int r = 0; r < Tile::kRowsPerWarp; ++r) {
    const int64_t row = first_row + warp() * Tile::kRowsPerWarp + r;
    if (row >= problem.rows) break;  // The whole warp leaves the loop.
    AnchorGradient<T> of_row[kParts];
    int32_t row_count[kParts] = {};
    ITM_FAST_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      if (p.options.rows() && part < problem.parts()) of_row[part] = anchor_gradient(p, part, true, row);
    }
    ITM_FAST_UNROLLED
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      const int64_t column = first_column + k * 32 + lane();
      const bool inside = column < problem.columns, positive = problem.has_diagonal() && row == column;
      T gradient = T(0);
      ITM_FAST_UNROLLED
      for (int part = 0; part < kParts; ++part) {
        const AnchorGradient<T>&by_row = of_row[part], &by_column = of_column[k][part];
        bool counts_for_row = false;
        if (inside && !positive && part < problem.parts()) {
          const bool is_spread = by_row.spreads() || by_column.spreads();
          const bool takes_part = is_spread && problem.is_negative(row, column);
          bool row_active = false, column_active = false;
          if (takes_part) {
            const int64_t at = row * problem.columns + column;
            const T key = problem.key(part, at, by_row.own);
            const T of_columns = problem.shares_keys(part) ? key : problem.key(part, at, by_column.own);
            row_active = by_row.spreads() && by_row.is_active(key);
            column_active = by_column.spreads() && by_column.is_active(of_columns);
          }
          const bool counts_all = takes_part && problem.has_positive_term(part);
          counts_for_row = row_active || (counts_all && by_row.spreads());
          column_count[k][part] += column_active || (counts_all && by_column.spreads());
          if (row_active || by_row.negative == column) gradient += by_row.weight;
          if (column_active || by_column.negative == row) gradient += by_column.weight;
        }
        if (p.row_counts != nullptr) row_count[part] += count_bits(ballot(counts_for_row));
      }
      if (inside && !positive) p.grad_scores[row * problem.columns + column] = gradient;
    }
    ITM_FAST_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      if (row_count[part] > 0 && lane() == 0) atomic_add(p.row_counts + part * problem.rows + row, row_count[part]);
    }
  }
  if (!counted && problem.has_diagonal()) {
    for (int r = thread_index(); r < Tile::kRows; r += Tile::kThreads) {
      const int64_t row = first_row + r;
      const bool stands_here = row >= first_column && row < first_column + Tile::kColumns && row < problem.rows;
      if (stands_here) write_positive(p, row);
    }
  }
  if (p.column_counts == nullptr) return;
  ITM_FAST_UNROLLED
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    ITM_FAST_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      if (column_count[k][part] > 0) {
        atomic_add(counts, part * Tile::kColumns + k * 32 + lane(), column_count[k][part]);
      }
    }
  }
  barrier();
  for (int c = thread_index(); c < kParts * Tile::kColumns; c += Tile::kThreads) {
    const int32_t count = counts[c];
    const int64_t column = first_column + c % Tile::kColumns;
    if (count > 0) atomic_add(p.column_counts + c / Tile::kColumns * problem.columns + column, count);
  }
}

// Grid: one block per tile; tiles of a strip of rows are adjacent.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void triplet_backward(const TripletBackward<Problem>& p) {
  const int64_t column_tiles = tiles_of(p.problem.columns, Tile::kColumns);
  write_gradient_tile<Problem, Tile>(p, block_index() / column_tiles, block_index() % column_tiles);
  if (leaves_positives(p)) finish_positives(p, column_tiles * tiles_of(p.problem.rows, Tile::kRows));
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
