// The backward of cross_attention_scores on a GPU: three launches, or four.
//
// list_pairs (pair_lists.h) finds the pairs with a score gradient. differentiate_pairs recomputes each of them and
// keeps the factors of its rows. accumulate_gradients then computes the gradient of every row. One thread owns a row
// and adds the pairs of its set's list in order, without atomics, so results do not depend on the order of blocks or
// threads. With K contexts, n queries and width d, a pair takes 8 K n d multiply-adds: three in differentiate_pairs,
// three for its contexts and two for its queries. The contexts and the queries each form the attended vectors once
// more.
//
// A pair keeps 3 K n + 4 n numbers, and the memory for them is limited. Pairs beyond the limit are left to
// finish_pairs; the host knows whether the product of all rows exceeds it. finish_pairs takes set after set, computes
// the pairs of its list one by one, and adds them to the sums so far. Each such pair is computed twice.
//
// A list with a pair for every set is no bottleneck. Each of its pairs is a separate task of differentiate_pairs, and
// its sums are split by columns: one block does two or three parts in 8 d / 32 of the list's work.
#pragma once

#include "itm_fast/cuda/pair_gradient.h"
#include "itm_fast/cuda/pair_lists.h"

namespace itm_fast::cuda {

// Columns of a slice, one per lane, and rows of a set that a thread accumulates at a time.
inline constexpr int kSliceColumns = 32, kSumRows = 8, kTileRows = kGradientWarps * kSumRows;
// Attended vectors that a block forms at a time.
inline constexpr int kAttendedWords = 16;
inline constexpr float kNotANumber = __builtin_nanf("");

template <typename S>
struct CrossAttentionBackward {
  PairLists<S> lists;
  PairOptions options;
  int64_t dim;
  PairNumbers numbers;
  int64_t room_for_scores, room_for_rows;  // for kept pairs
  float* attended;                         // kAttendedQueries vectors per block
  S *query_gradients, *context_gradients;  // null if not requested
  float *query_sums, *context_sums;        // gradients so far, if pairs may exceed the room
  int64_t differentiating_blocks, finishing_blocks;

  ITM_FAST_DEVICE bool keeps(const ListedPair& pair) const {
    return pair.score + pair.n_queries * pair.n_contexts <= room_for_scores &&
           pair.row + pair.n_queries <= room_for_rows;
  }
  ITM_FAST_DEVICE PairRows<S> rows_of(const ListedPair& pair) const {
    return {lists.queries.values + lists.queries.offset(pair.query) * dim,
            lists.contexts.values + lists.contexts.offset(pair.context) * dim, static_cast<int>(pair.n_queries),
            static_cast<int>(pair.n_contexts), dim};
  }
  ITM_FAST_DEVICE float gradient_of(const ListedPair& pair) const {
    return lists.gradients[pair.query * lists.contexts.n_sets + pair.context];
  }
  ITM_FAST_DEVICE float* attended_of_block() const { return attended + block_index() * kAttendedQueries * dim; }
};

// Grid: differentiating_blocks; the blocks share the kept pairs in turn.
template <typename S>
ITM_FAST_DEVICE void differentiate_pairs(const CrossAttentionBackward<S>& p) {
  const int64_t n_pairs = *p.lists.total;
  for (int64_t number = block_index(); number < n_pairs; number += p.differentiating_blocks) {
    const ListedPair pair = numbered_pair(p.lists, number);
    if (!p.keeps(pair)) return;  // Later pairs are not kept either.
    differentiate_pair(p.rows_of(pair), p.gradient_of(pair), p.options, p.attended_of_block(),
                       p.numbers.at(pair.row, pair.score));
  }
}

// The sums of one thread: row first_row + warp() + kGradientWarps * i of its set and tile, one column.
struct RowSums {
  float values[kSumRows] = {};

  ITM_FAST_DEVICE void add(const RowSums& other) {
    for (int i = 0; i < kSumRows; ++i) values[i] += other.values[i];
  }
  // Calls body(value, row) for the existing rows.
  template <typename Body>
  ITM_FAST_DEVICE void each(int first_row, int n_rows, const Body& body) {
    for (int i = 0; i < kSumRows; ++i) {
      const int row = first_row + warp() + kGradientWarps * i;
      if (row < n_rows) body(values[i], row);
    }
  }
};

// Adds a pair's part of the gradient to rows of its context set: sum_j (scores_jk q_j + p_jk (dot_j q_j + square_j
// c_j)). The attended vectors c are recomputed for the slice. For all threads of the block.
template <typename S>
ITM_FAST_DEVICE RowSums sums_of_contexts(const PairRows<S>& rows, const PairNumbers& numbers, int first_row,
                                         int64_t column) {
  ITM_FAST_SHARED(float, vectors, kAttendedWords* kSliceColumns);
  const int n_contexts = rows.n_contexts;
  const bool inside = column < rows.dim;
  RowSums sums;
  for (int first = 0; first < rows.n_queries; first += kAttendedWords) {
    const int count = static_cast<int>(smaller(kAttendedWords, rows.n_queries - first));
    for (int b = warp(); b < count && inside; b += kGradientWarps) {
      const float* attention = numbers.attention + static_cast<int64_t>(first + b) * n_contexts;
      float sum = 0.0f;
      for (int k = 0; k < n_contexts; ++k) sum += attention[k] * widen(rows.contexts[k * rows.dim + column]);
      vectors[b * kSliceColumns + lane()] =
          numbers.dot[first + b] * widen(rows.queries[(first + b) * rows.dim + column]) +
          numbers.square[first + b] * sum;
    }
    barrier();
    for (int b = 0; b < count && inside; ++b) {
      const int64_t at = static_cast<int64_t>(first + b) * n_contexts;
      const float query = widen(rows.queries[(first + b) * rows.dim + column]);
      const float vector = vectors[b * kSliceColumns + lane()];
      sums.each(first_row, n_contexts,
                [&](float& sum, int k) { sum += numbers.scores[at + k] * query + numbers.attention[at + k] * vector; });
    }
    barrier();
  }
  return sums;
}

// A pair's part of the gradient of rows of its query set: sum_k scores_jk x_k + dot_j c_j + norm_j q_j.
template <typename S>
ITM_FAST_DEVICE RowSums sums_of_queries(const PairRows<S>& rows, const PairNumbers& numbers, int first_row,
                                        int64_t column) {
  RowSums sums, attended;
  if (column >= rows.dim) return sums;
  for (int k = 0; k < rows.n_contexts; ++k) {
    const float x = widen(rows.contexts[k * rows.dim + column]);
    const auto at = [&](int j) { return static_cast<int64_t>(j) * rows.n_contexts + k; };
    sums.each(first_row, rows.n_queries, [&](float& sum, int j) { sum += numbers.scores[at(j)] * x; });
    attended.each(first_row, rows.n_queries, [&](float& sum, int j) { sum += numbers.attention[at(j)] * x; });
  }
  attended.each(first_row, rows.n_queries, [&](float& sum, int j) {
    sum = numbers.dot[j] * sum + numbers.norm[j] * widen(rows.queries[j * rows.dim + column]);
  });
  sums.add(attended);
  return sums;
}

// Whether a row is all zeros: such a row has no direction and receives no gradient. For all lanes of a warp.
template <typename S>
ITM_FAST_DEVICE bool is_zero_row(const S* row, int64_t dim) {
  for (int64_t first = 0; first < dim; first += 32) {
    const int64_t column = first + lane();
    float found[1] = {column < dim && !(widen(row[column]) == 0.0f) ? 1.0f : 0.0f};
    if (sum_over_lanes(found) > 0.0f) return false;
  }
  return true;
}

// One set of either side, with its list and its rows' gradients.
template <typename S>
struct Destination {
  bool is_context;
  int64_t set;
  int n_rows;
  const S* values;
  int32_t n_pairs;
  const int32_t* list;
  S* gradients;
  float* sums;  // null if all pairs are certain to fit
};

// Set `number` of those that need a gradient, context sets first.
template <typename S>
ITM_FAST_DEVICE Destination<S> destination(const CrossAttentionBackward<S>& p, int64_t number) {
  const PairLists<S>& lists = p.lists;
  const int64_t n_contexts = p.context_gradients != nullptr ? lists.contexts.n_sets : 0;
  const bool is_context = number < n_contexts;
  const int64_t set = is_context ? number : number - n_contexts;
  const SetRows<S>& rows = is_context ? lists.contexts : lists.queries;
  const int64_t start = rows.offset(set) * p.dim;
  S* gradients = (is_context ? p.context_gradients : p.query_gradients) + start;
  float* sums = is_context ? p.context_sums : p.query_sums;
  if (sums != nullptr) sums += start;
  if (is_context) {
    return {true,
            set,
            static_cast<int>(rows.length(set)),
            rows.values + start,
            lists.context_counts[set],
            lists.context_lists + set * lists.queries.n_sets,
            gradients,
            sums};
  }
  return {false,
          set,
          static_cast<int>(rows.length(set)),
          rows.values + start,
          lists.query_counts[set],
          lists.query_lists + set * lists.contexts.n_sets,
          gradients,
          sums};
}

template <typename S>
ITM_FAST_DEVICE ListedPair pair_of(const CrossAttentionBackward<S>& p, const Destination<S>& to, int32_t entry) {
  const int64_t other = to.list[entry];
  return to.is_context ? listed_pair(p.lists, other, to.set) : listed_pair(p.lists, to.set, other);
}

template <typename S>
ITM_FAST_DEVICE RowSums sums_of(const CrossAttentionBackward<S>& p, const Destination<S>& to, const ListedPair& pair,
                                const PairNumbers& numbers, int first_row, int64_t column) {
  return to.is_context ? sums_of_contexts(p.rows_of(pair), numbers, first_row, column)
                       : sums_of_queries(p.rows_of(pair), numbers, first_row, column);
}

constexpr int64_t slices_of(int64_t dim) { return tiles_of(dim, kSliceColumns); }

// Grid: one block per set that needs a gradient and per slice of the columns; the slices of a set are adjacent. Adds
// the pairs of a set's list one by one, each after its own sum, so there are as many roundings as with one pair at a
// time.
template <typename S>
ITM_FAST_DEVICE void accumulate_gradients(const CrossAttentionBackward<S>& p) {
  const int64_t n_slices = slices_of(p.dim);
  const Destination<S> to = destination(p, block_index() / n_slices);
  const int64_t column = block_index() % n_slices * kSliceColumns + lane();
  for (int first_row = 0; first_row < to.n_rows; first_row += kTileRows) {
    RowSums totals;
    for (int32_t entry = 0; entry < to.n_pairs; ++entry) {
      const ListedPair pair = pair_of(p, to, entry);
      if (!p.keeps(pair)) break;  // Later pairs are not kept either.
      const PairNumbers numbers = p.numbers.at(pair.row, pair.score);
      totals.add(sums_of(p, to, pair, numbers, first_row, column));
    }
    totals.each(first_row, to.n_rows, [&](float& total, int row) {
      if (is_zero_row(to.values + row * p.dim, p.dim)) total = 0.0f;
    });
    if (column >= p.dim) continue;
    totals.each(first_row, to.n_rows, [&](float total, int row) {
      if (to.sums != nullptr) {
        to.sums[row * p.dim + column] = total;
      } else {
        narrow(total, to.gradients[row * p.dim + column]);
      }
    });
  }
}

// Adds the pairs of a set that were not kept. They are computed in the given memory, which holds the given numbers of
// query rows and raw scores.
template <typename S>
ITM_FAST_DEVICE void add_remaining(const CrossAttentionBackward<S>& p, const Destination<S>& to,
                                   const PairNumbers& numbers, int64_t row_room, int64_t score_room) {
  for (int32_t entry = 0; entry < to.n_pairs; ++entry) {
    const ListedPair pair = pair_of(p, to, entry);
    if (p.keeps(pair)) continue;
    const bool has_room = pair.n_queries <= row_room && pair.n_queries * pair.n_contexts <= score_room;
    if (has_room) {
      differentiate_pair(p.rows_of(pair), p.gradient_of(pair), p.options, p.attended_of_block(), numbers);
    }
    for (int64_t first = 0; first < p.dim; first += kSliceColumns) {
      const int64_t column = first + lane();
      for (int first_row = 0; first_row < to.n_rows; first_row += kTileRows) {
        RowSums sums;
        if (has_room) sums = sums_of(p, to, pair, numbers, first_row, column);
        if (column >= p.dim) continue;
        sums.each(first_row, to.n_rows,
                  [&](float sum, int row) { to.sums[row * p.dim + column] += has_room ? sum : kNotANumber; });
      }
    }
    barrier();  // Read the numbers before those of the next pair replace them.
  }
}

// Grid: finishing_blocks, which share the memory of the pairs' numbers; fewer of them work if pairs are large. If a
// single pair exceeds all of it, the gradients of its sets become NaN.
template <typename S>
ITM_FAST_DEVICE void finish_pairs(const CrossAttentionBackward<S>& p) {
  const PairLists<S>& lists = p.lists;
  const int64_t scores = static_cast<int64_t>(*lists.most_scores), rows = static_cast<int64_t>(*lists.most_rows);
  int64_t workers = p.finishing_blocks;
  if (rows > 0) workers = smaller(workers, smaller(p.room_for_scores / scores, p.room_for_rows / rows));
  if (workers < 1) workers = 1;
  if (block_index() >= workers) return;
  const int64_t row_room = p.room_for_rows / workers, score_room = p.room_for_scores / workers;
  const PairNumbers numbers = p.numbers.at(block_index() * row_room, block_index() * score_room);
  const int64_t n_sets = (p.context_gradients != nullptr ? lists.contexts.n_sets : 0) +
                         (p.query_gradients != nullptr ? lists.queries.n_sets : 0);
  for (int64_t number = block_index(); number < n_sets; number += workers) {
    const Destination<S> to = destination(p, number);
    add_remaining(p, to, numbers, row_room, score_room);
    barrier();
    for (int row = warp(); row < to.n_rows; row += kGradientWarps) {
      const int64_t start = row * p.dim;
      const bool is_zero = is_zero_row(to.values + start, p.dim);
      for (int64_t c = lane(); c < p.dim; c += 32) narrow(is_zero ? 0.0f : to.sums[start + c], to.gradients[start + c]);
    }
  }
}

}  // namespace itm_fast::cuda
