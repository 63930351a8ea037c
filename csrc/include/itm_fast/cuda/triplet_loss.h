// triplet_loss, boosting_loss and hardest_negatives on a GPU: one launch, one pass over the scores for both directions.
//
// A block takes one tile of the score matrix, with warps over rows and lanes over columns. For every row and every
// column of the tile, it writes the best negative and the sum of the hinges to a workspace. The last block of a strip
// of tiles to finish merges the strip's tiles in order and computes the results per anchor; the last of these adds the
// losses up. Results therefore do not depend on the order of blocks or threads. Among equal negatives the one with the
// lowest index is taken: partial results are merged from the lowest tile up, and within a tile by index.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast::cuda {

// Partial results of the tiles for the anchors of one direction, [part][tile][anchor].
template <typename T>
struct TripletPartials {
  T* best;
  int32_t* index;
  double* sum;
};

template <typename T>
struct AnchorResults {
  T* values;         // the anchors' losses, not yet halved or summed; or the hardest negatives' scores
  int64_t* indices;  // [part] negatives that receive gradients (null for Mining::all); or the hardest negatives
  int64_t stride;    // from part to part
};

template <typename Problem>
struct TripletForward {
  using T = typename Problem::T;
  Problem problem;
  TripletOptions options;
  bool keeps_hardest;  // hardest_negatives: no loss is computed
  TripletPartials<T> row_partials, column_partials;
  AnchorResults<T> rows, columns;
  T* loss;            // the sum or mean; null if each anchor's loss is kept
  int32_t* counters;  // zero: one per strip of rows, then one per strip of columns, then one for all strips
};

template <typename T>
struct Candidate {
  T score;
  int32_t index;  // -1: no negative
};

// NaN is above everything, as in torch.max; among equal scores the lower index wins.
template <typename T>
ITM_FAST_DEVICE bool is_harder(const Candidate<T>& candidate, const Candidate<T>& held) {
  if (candidate.index < 0) return false;
  if (held.index < 0) return true;
  const bool candidate_is_nan = candidate.score != candidate.score, held_is_nan = held.score != held.score;
  const bool equal = candidate.score == held.score || (candidate_is_nan && held_is_nan);
  if (equal) return candidate.index < held.index;
  return candidate_is_nan || (!held_is_nan && candidate.score > held.score);
}

// Every lane gets the hardest of all lanes.
template <typename T>
ITM_FAST_DEVICE Candidate<T> hardest_of_warp(Candidate<T> held) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const Candidate<T> other{shuffle_xor(held.score, distance), shuffle_xor(held.index, distance)};
    if (is_harder(other, held)) held = other;
  }
  return held;
}

ITM_FAST_DEVICE double sum_of_warp(double value) {
  for (int distance = 16; distance > 0; distance /= 2) value += shuffle_xor(value, distance);
  return value;
}

// Running result of one anchor over the candidates in its row or column.
template <typename T>
struct Found {
  T positive = T(0), margin = T(0), own = T(0);
  T each = T(0);  // counted with every negative
  Candidate<T> hardest{T(0), -1};
  T sum = T(0);

  template <typename Problem>
  ITM_FAST_DEVICE void begin(const Problem& problem, const TripletOptions& options, int part, int64_t anchor) {
    positive = problem.positive(part, anchor);
    margin = problem.margin(part, options);
    own = problem.own(part, anchor);
    if (options.mining == Mining::all) each = problem.positive_term(part, anchor);
  }
  ITM_FAST_DEVICE void take(const TripletOptions& options, T score, int32_t index) {
    if (options.needs_hardest() && !(options.mining == Mining::semi_hard && score >= positive)) {
      const Candidate<T> candidate{score, index};
      if (is_harder(candidate, hardest)) hardest = candidate;
    }
    if (options.needs_sums()) sum += hinge(margin, score, positive) + each;
  }
};

// Scans one tile for one part and writes its partial results.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void scan_tile(const TripletForward<Problem>& p, int part, int64_t row_tile, int64_t column_tile) {
  using T = typename Problem::T;
  constexpr int kFound = Tile::kWarps * Tile::kColumns;
  ITM_FAST_SHARED(T, best_of_warps, kFound);
  ITM_FAST_SHARED(int32_t, index_of_warps, kFound);
  ITM_FAST_SHARED(T, sum_of_warps, kFound);
  const Problem& problem = p.problem;
  const TripletOptions& options = p.options;
  const int64_t first_row = row_tile * Tile::kRows, first_column = column_tile * Tile::kColumns;

  Found<T> columns[Tile::kColumnsPerLane];
  ITM_FAST_UNROLLED
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    const int64_t column = first_column + k * 32 + lane();
    if (options.columns() && column < problem.columns) columns[k].begin(problem, options, part, column);
  }
  for (int r = 0; r < Tile::kRowsPerWarp; ++r) {
    const int64_t row = first_row + warp() * Tile::kRowsPerWarp + r;
    if (row >= problem.rows) break;  // The whole warp leaves the loop.
    Found<T> found;
    if (options.rows()) found.begin(problem, options, part, row);
    ITM_FAST_UNROLLED
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      const int64_t column = first_column + k * 32 + lane();
      if (column >= problem.columns || !problem.is_negative(row, column)) continue;
      const T key = problem.key(part, row * problem.columns + column, found.own);
      if (options.rows()) found.take(options, key, static_cast<int32_t>(column));
      if (!options.columns()) continue;
      const bool shared = problem.shares_keys(part);
      const T of_column = shared ? key : problem.key(part, row * problem.columns + column, columns[k].own);
      columns[k].take(options, of_column, static_cast<int32_t>(row));
    }
    if (!options.rows()) continue;
    const int64_t at = (part * tiles_of(problem.columns, Tile::kColumns) + column_tile) * problem.rows + row;
    if (options.needs_hardest()) {
      const Candidate<T> hardest = hardest_of_warp(found.hardest);
      if (lane() == 0) {
        p.row_partials.best[at] = hardest.score;
        p.row_partials.index[at] = hardest.index;
      }
    }
    if (options.needs_sums()) {
      const double sum = sum_of_warp(found.sum);
      if (lane() == 0) p.row_partials.sum[at] = sum;
    }
  }
  if (!options.columns()) return;

  ITM_FAST_UNROLLED
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    const int at = warp() * Tile::kColumns + k * 32 + lane();
    best_of_warps[at] = columns[k].hardest.score;
    index_of_warps[at] = columns[k].hardest.index;
    sum_of_warps[at] = columns[k].sum;
  }
  barrier();
  for (int c = thread_index(); c < Tile::kColumns && first_column + c < problem.columns; c += Tile::kThreads) {
    Candidate<T> hardest{T(0), -1};
    double sum = 0.0;
    for (int w = 0; w < Tile::kWarps; ++w) {
      const int at = w * Tile::kColumns + c;
      const Candidate<T> candidate{best_of_warps[at], index_of_warps[at]};
      if (is_harder(candidate, hardest)) hardest = candidate;
      sum += static_cast<T>(sum_of_warps[at]);
    }
    const int64_t tile = part * tiles_of(problem.rows, Tile::kRows) + row_tile;
    const int64_t at = tile * problem.columns + first_column + c;
    if (options.needs_hardest()) {
      p.column_partials.best[at] = hardest.score;
      p.column_partials.index[at] = hardest.index;
    }
    if (options.needs_sums()) p.column_partials.sum[at] = sum;
  }
}

template <typename Problem, typename Tile>
ITM_FAST_DEVICE void scan_parts(const TripletForward<Problem>& p, int64_t row_tile, int64_t column_tile) {
  for (int part = 0; part < p.problem.parts(); ++part) {
    if (part > 0) barrier();  // All have read what the warps found before.
    scan_tile<Problem, Tile>(p, part, row_tile, column_tile);
  }
}

template <typename Problem, typename T = typename Problem::T>
ITM_FAST_DEVICE AnchorLoss<T> loss_of_anchor(const TripletForward<Problem>& p, int part, int64_t anchor,
                                             const Candidate<T>& hardest, double sum, int64_t candidates) {
  const T positive = p.problem.positive(part, anchor), term = p.problem.positive_term(part, anchor);
  // A positive that is NaN stays visible if it has no negative to be compared with.
  const T visible = positive != positive ? positive : term != term ? term : T(0);
  if (p.options.mining == Mining::all) {
    return {visible == visible ? static_cast<T>(sum) : visible, kAllNegatives};
  }
  if (hardest.index < 0) return {visible == visible ? term : visible, kNoGradient};
  const T average = static_cast<T>(sum / p.problem.divisor(p.options, candidates));
  TripletOptions options = p.options;
  options.margin = p.problem.margin(part, p.options);
  const AnchorLoss<T> mined =
      mined_loss(options, positive, hardest.score, static_cast<int64_t>(hardest.index), average);
  return {mined.value + term, mined.negative};
}

// Merges the results of `tiles` tiles for anchors [first, last) of one direction.
template <typename Problem, typename T = typename Problem::T>
ITM_FAST_DEVICE void finish_anchors(const TripletForward<Problem>& p, const TripletPartials<T>& partials,
                                    const AnchorResults<T>& results, int64_t tiles, int64_t first, int64_t last,
                                    int64_t anchors, int64_t candidates) {
  for (int64_t anchor = first + thread_index(); anchor < last; anchor += block_threads()) {
    T value = T(0);
    for (int part = 0; part < p.problem.parts(); ++part) {
      Candidate<T> hardest{T(0), -1};
      double sum = 0.0;
      for (int64_t tile = part * tiles; tile < (part + 1) * tiles; ++tile) {
        const int64_t at = tile * anchors + anchor;
        if (p.options.needs_hardest()) {
          const Candidate<T> candidate{load_coherent(partials.best + at), load_coherent(partials.index + at)};
          if (is_harder(candidate, hardest)) hardest = candidate;
        }
        if (p.options.needs_sums()) sum += load_coherent(partials.sum + at);
      }
      if (p.keeps_hardest) {
        value = hardest.index < 0 ? -infinity<T>() : hardest.score;
        results.indices[anchor] = hardest.index;
      } else {
        const AnchorLoss<T> loss = loss_of_anchor(p, part, anchor, hardest, sum, candidates);
        value += loss.value;
        if (results.indices != nullptr) results.indices[part * results.stride + anchor] = loss.negative;
      }
    }
    results.values[anchor] = (p.loss == nullptr && p.options.halve ? T(0.5) : T(1)) * value;
  }
}

// The last block adds up the losses: thread t takes every kThreads-th loss, then the threads are summed by halves.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void add_losses(const TripletForward<Problem>& p) {
  ITM_FAST_SHARED(double, sums, Tile::kThreads);
  const int64_t anchors = p.options.rows() ? p.problem.rows : p.problem.columns;
  double sum = 0.0;
  for (int64_t anchor = thread_index(); anchor < anchors; anchor += Tile::kThreads) {
    if (p.options.rows()) sum += load_coherent(p.rows.values + anchor);
    if (p.options.columns()) sum += load_coherent(p.columns.values + anchor);
  }
  sums[thread_index()] = sum;
  for (int half = Tile::kThreads / 2; half > 0; half /= 2) {
    barrier();
    if (thread_index() < half) sums[thread_index()] += sums[thread_index() + half];
  }
  if (thread_index() == 0) {
    double total = sums[0];
    if (p.options.reduction == Reduction::mean) total /= static_cast<double>(anchors > 0 ? anchors : 1);
    *p.loss = static_cast<typename Problem::T>(total * (p.options.halve ? 0.5 : 1.0));
  }
}

// Grid: one block per tile; tiles of a strip of rows are adjacent.
template <typename Problem, typename Tile>
ITM_FAST_DEVICE void triplet_forward(const TripletForward<Problem>& p) {
  ITM_FAST_SHARED(int32_t, is_last, 3);
  const int64_t row_tiles = tiles_of(p.problem.rows, Tile::kRows);
  const int64_t column_tiles = tiles_of(p.problem.columns, Tile::kColumns);
  const int64_t row_tile = block_index() / column_tiles, column_tile = block_index() % column_tiles;
  scan_parts<Problem, Tile>(p, row_tile, column_tile);

  memory_fence();
  barrier();
  if (thread_index() == 0) {
    is_last[0] = p.options.rows() && atomic_add(p.counters + row_tile, 1) == column_tiles - 1;
    is_last[1] = p.options.columns() && atomic_add(p.counters + row_tiles + column_tile, 1) == row_tiles - 1;
  }
  barrier();
  const int32_t finishes_rows = is_last[0], finishes_columns = is_last[1];
  if (finishes_rows + finishes_columns == 0) return;  // The whole block returns.
  memory_fence();
  if (finishes_rows != 0) {
    const int64_t first = row_tile * Tile::kRows;
    finish_anchors(p, p.row_partials, p.rows, column_tiles, first, smaller(first + Tile::kRows, p.problem.rows),
                   p.problem.rows, p.problem.columns);
  }
  if (finishes_columns != 0) {
    const int64_t first = column_tile * Tile::kColumns;
    finish_anchors(p, p.column_partials, p.columns, row_tiles, first,
                   smaller(first + Tile::kColumns, p.problem.columns), p.problem.columns, p.problem.rows);
  }
  if (p.loss == nullptr) return;

  memory_fence();
  barrier();
  if (thread_index() == 0) {
    const int64_t strips = (p.options.rows() ? row_tiles : 0) + (p.options.columns() ? column_tiles : 0);
    const int32_t finished = finishes_rows + finishes_columns;
    is_last[2] = atomic_add(p.counters + row_tiles + column_tiles, finished) + finished == strips;
  }
  barrier();
  if (is_last[2] == 0) return;
  memory_fence();
  add_losses<Problem, Tile>(p);
}

}  // namespace itm_fast::cuda
