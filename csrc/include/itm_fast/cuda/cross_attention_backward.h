// The backward of cross_attention_scores on a GPU: two launches.
//
// list_pairs (pair_lists.h) finds the pairs with a score gradient. backpropagate_pairs then takes as many of them at a
// time as their numbers have room for. It recomputes each of these pairs and keeps the factors of its rows; after a
// barrier of the grid it adds to the gradient of every row. One thread owns a row and adds the pairs of its set's list
// in order, without atomics, so results do not depend on the order of blocks or threads. With K contexts, n queries and
// width d, a pair takes 8 K n d multiply-adds: three to recompute it, three for its contexts and two for its queries.
// The contexts and the queries each form the attended vectors once more.
//
// A list with a pair for every set is no bottleneck. Each of its pairs is a separate task, and its sums are split by
// columns: one block does two or three parts in 8 d / 32 of the list's work.
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
  float* numbers;  // of the pairs of a chunk
  int64_t room;    // how many
  bool may_need_chunks;
  float* attended;                         // kAttendedQueries vectors per block
  S *query_gradients, *context_gradients;  // null if not requested
  float *query_sums, *context_sums;        // gradients so far; null if one chunk holds all pairs
  int32_t* arrived;                        // zero: for the barriers of the grid

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

// Pairs that are computed together: those whose numbers start from `begin` up to `end`, in the order of the lists.
struct PairChunk {
  int64_t begin, end;
  bool is_first, is_last;
};

// The chunks of a call. The numbers of the last pair of a chunk may reach past its end by those of the largest pair.
struct PairChunks {
  int64_t count, width;

  template <typename S>
  ITM_FAST_DEVICE explicit PairChunks(const CrossAttentionBackward<S>& p) {
    const int64_t total = *p.lists.total_numbers;
    width =
        total <= p.room || !p.may_need_chunks ? total + 1 : (p.room - static_cast<int64_t>(*p.lists.largest)) / 16 * 16;
    count = total / width + 1;
  }
  ITM_FAST_DEVICE PairChunk operator[](int64_t i) const { return {i * width, (i + 1) * width, i == 0, i + 1 == count}; }
};

// Only invalid offsets make a chunk of more numbers than the room.
template <typename S>
ITM_FAST_DEVICE bool has_place(const CrossAttentionBackward<S>& p, const PairChunk& chunk, const ListedPair& pair) {
  const int64_t numbers = pair.numbers();
  return numbers <= p.lists.most_numbers && pair.start - chunk.begin + numbers <= p.room;
}

template <typename S>
ITM_FAST_DEVICE PairNumbers numbers_of(const CrossAttentionBackward<S>& p, const PairChunk& chunk,
                                       const ListedPair& pair) {
  return {p.numbers + (pair.start - chunk.begin), pair.n_queries, pair.n_contexts};
}

// The blocks share the pairs of the chunk in turn.
template <typename S>
ITM_FAST_DEVICE void differentiate_pairs(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  const int64_t first = chunk.is_first ? 0 : first_pair_from(p.lists, chunk.begin);
  const int64_t last = chunk.is_last ? *p.lists.total : first_pair_from(p.lists, chunk.end);
  for (int64_t number = first + block_index(); number < last; number += grid_blocks()) {
    const ListedPair pair = numbered_pair(p.lists, number);
    if (!has_place(p, chunk, pair)) continue;
    differentiate_pair(p.rows_of(pair), p.gradient_of(pair), p.options, p.attended_of_block(),
                       numbers_of(p, chunk, pair));
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
  float* sums;  // null if one chunk holds all pairs
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

constexpr int64_t slices_of(int64_t dim) { return tiles_of(dim, kSliceColumns); }

// Adds the pairs of a chunk to the gradient of a set's rows, one slice of the columns. Pairs are added one by one, each
// after its own sum, so there are as many roundings as with one pair at a time. If the numbers of a pair have no place,
// the gradients of its sets become NaN.
template <typename S>
ITM_FAST_DEVICE void accumulate_rows(const CrossAttentionBackward<S>& p, const PairChunk& chunk,
                                     const Destination<S>& to, int64_t column) {
  const auto pair_at = [&](int32_t entry) { return pair_of(p, to, entry); };
  const int32_t first = chunk.is_first ? 0 : first_entry_from(to.n_pairs, chunk.begin, pair_at);
  const int32_t last = chunk.is_last ? to.n_pairs : first_entry_from(to.n_pairs, chunk.end, pair_at);
  if (first == last && !chunk.is_first && !chunk.is_last) return;
  for (int first_row = 0; first_row < to.n_rows; first_row += kTileRows) {
    RowSums totals;
    for (int32_t entry = first; entry < last; ++entry) {
      const ListedPair pair = pair_at(entry);
      if (has_place(p, chunk, pair)) {
        const PairNumbers numbers = numbers_of(p, chunk, pair);
        totals.add(to.is_context ? sums_of_contexts(p.rows_of(pair), numbers, first_row, column)
                                 : sums_of_queries(p.rows_of(pair), numbers, first_row, column));
      } else {
        totals.each(first_row, to.n_rows, [](float& total, int) { total = kNotANumber; });
      }
    }
    totals.each(first_row, to.n_rows, [&](float& total, int row) {
      if (is_zero_row(to.values + row * p.dim, p.dim)) total = 0.0f;
    });
    if (column >= p.dim) continue;
    totals.each(first_row, to.n_rows, [&](float total, int row) {
      const int64_t at = row * p.dim + column;
      if (!chunk.is_first) total += to.sums[at];
      if (chunk.is_last) {
        narrow(total, to.gradients[at]);
      } else {
        to.sums[at] = total;
      }
    });
  }
}

// The blocks share the sets that need a gradient, and the slices of their columns, in turn.
template <typename S>
ITM_FAST_DEVICE void accumulate_gradients(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  const PairLists<S>& lists = p.lists;
  const int64_t n_sets = (p.context_gradients != nullptr ? lists.contexts.n_sets : 0) +
                         (p.query_gradients != nullptr ? lists.queries.n_sets : 0);
  const int64_t n_slices = slices_of(p.dim);
  for (int64_t task = block_index(); task < n_sets * n_slices; task += grid_blocks()) {
    const int64_t column = task % n_slices * kSliceColumns + lane();
    accumulate_rows(p, chunk, destination(p, task / n_slices), column);
  }
}

// Grid: blocks that are resident together. They share the pairs of a chunk, then its sums.
template <typename S>
ITM_FAST_DEVICE void backpropagate_pairs(const CrossAttentionBackward<S>& p) {
  const PairChunks chunks(p);
  int32_t round = 0;
  for (int64_t i = 0; i < chunks.count; ++i) {
    if (i > 0) grid_barrier(p.arrived, ++round);  // The numbers of the last chunk have been read.
    differentiate_pairs(p, chunks[i]);
    grid_barrier(p.arrived, ++round);
    accumulate_gradients(p, chunks[i]);
  }
}

}  // namespace itm_fast::cuda
