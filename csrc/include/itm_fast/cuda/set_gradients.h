// The gradients of the rows of whole sets, from the numbers of the pairs of a chunk: steps 3 and 4 of
// backpropagate_pairs.
#pragma once

#include "itm_fast/cuda/backward_chunk.h"

namespace itm_fast::cuda {

inline constexpr float kNotANumber = __builtin_nanf("");

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

template <typename S>
ITM_FAST_DEVICE Destination<S> destination_context(const CrossAttentionBackward<S>& p, int64_t set) {
  const SetRows<S>& rows = p.lists.contexts;
  const int64_t start = rows.offset(set) * p.dim;
  return {true,
          set,
          static_cast<int>(rows.length(set)),
          rows.values + start,
          p.lists.context_counts[set],
          p.lists.context_lists + set * p.lists.queries.n_sets,
          p.context_gradients + start,
          p.context_sums == nullptr ? nullptr : p.context_sums + start};
}

template <typename S>
ITM_FAST_DEVICE Destination<S> destination_query(const CrossAttentionBackward<S>& p, int64_t set) {
  const SetRows<S>& rows = p.lists.queries;
  const int64_t start = rows.offset(set) * p.dim;
  return {false,
          set,
          static_cast<int>(rows.length(set)),
          rows.values + start,
          p.lists.query_counts[set],
          p.lists.query_lists + set * p.lists.contexts.n_sets,
          p.query_gradients + start,
          p.query_sums == nullptr ? nullptr : p.query_sums + start};
}

template <typename S>
ITM_FAST_DEVICE ListedPair pair_of(const CrossAttentionBackward<S>& p, const Destination<S>& to, int32_t entry) {
  const int64_t other = to.list[entry];
  return to.is_context ? listed_pair(p.lists, other, to.set) : listed_pair(p.lists, to.set, other);
}

// The entries of a set's list that belong to the chunk.
struct ListedEntries {
  int32_t first, last;
};
template <typename S>
ITM_FAST_DEVICE ListedEntries entries_of(const CrossAttentionBackward<S>& p, const PairChunk& chunk,
                                         const Destination<S>& to) {
  const auto pair_at = [&](int32_t entry) { return pair_of(p, to, entry); };
  return {chunk.is_first ? 0 : first_entry_from(to.n_pairs, chunk.begin, pair_at),
          chunk.is_last ? to.n_pairs : first_entry_from(to.n_pairs, chunk.end, pair_at)};
}

// Step 3 for a context set: the sum of p' diag(square) p over its list, for a run of rows from `first`.
template <typename S>
ITM_FAST_DEVICE void sum_squares(const CrossAttentionBackward<S>& p, const PairChunk& chunk, int64_t set, int first) {
  constexpr int kParts = RowParts<S>::kOfCoefficients;
  using Row = SplitElement<kParts>;
  const Destination<S> to = destination_context(p, set);
  const PartMatrix<kParts> matrix = p.template gram_of<kParts>(set);
  if (matrix.first == nullptr || first >= to.n_rows) return;
  const ListedEntries entries = entries_of(p, chunk, to);
  const int count = static_cast<int>(smaller(PartTile<Row>::kRows, to.n_rows - first));
  for (int column = 0; column < to.n_rows; column += PartTile<Row>::kColumns) {
    const PartRange range{first, count, column, to.n_rows, matrix.stride, matrix.stride};
    sum_parts<true, PartTile<Row>>(range, entries.first, entries.last, [&](int32_t entry) -> PartTerm<Row> {
      const Destination<S> to = destination_context(p, set);  // Looked up again: the sums need the registers.
      const ListedPair pair = pair_of(p, to, entry);
      const bool is_kept = has_place(p, chunk, pair);
      const PairNumbers numbers = numbers_of(p, chunk, is_kept ? pair : pair_of(p, to, entries.first));
      return {numbers.attention_parts<kParts>().first, reinterpret_cast<const Row*>(numbers.squares<kParts>().first),
              is_kept ? static_cast<int>(pair.n_queries) : 0};
    });
    each_part_sum<Row>(range, [&](int row, int c, float sum) { matrix.store(first + row, column + c, sum); });
    barrier();  // The sums have been read.
  }
}

// Step 3 for a query set, for a warp with a lane per pair: the sums of `norm` over its list.
template <typename S>
ITM_FAST_DEVICE void sum_norms(const CrossAttentionBackward<S>& p, const PairChunk& chunk, int64_t set) {
  const Destination<S> to = destination_query(p, set);
  const ListedEntries entries = entries_of(p, chunk, to);
  for (int row = 0; row < to.n_rows; ++row) {
    float sums[1] = {};
    for (int32_t entry = entries.first + lane(); entry < entries.last; entry += 32) {
      const ListedPair pair = pair_of(p, to, entry);
      if (has_place(p, chunk, pair)) sums[0] += numbers_of(p, chunk, pair).norm[row];
    }
    const float sum = sum_over_lanes(sums);
    if (lane() == 0) p.query_factors[p.lists.queries.offset(set) + row] = sum;
  }
}

// The blocks share the context sets of the chunk, and runs of their rows, and their warps the query sets, in turn.
template <typename S>
ITM_FAST_DEVICE void sum_lists(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  if (p.context_gradients != nullptr) {
    const int64_t runs = tiles_of(p.gram_contexts(), PartTile<S>::kRows);
    const int64_t tasks = (chunk.last_context - chunk.first_context) * runs;
    for (int64_t task = block_index(); task < tasks; task += grid_blocks()) {
      sum_squares(p, chunk, chunk.first_context + task / runs, static_cast<int>(task % runs) * PartTile<S>::kRows);
    }
  }
  if (p.query_gradients == nullptr) return;
  for (int64_t set = block_index() * kGradientWarps + warp(); set < p.lists.queries.n_sets;
       set += grid_blocks() * kGradientWarps) {
    sum_norms(p, chunk, set);
  }
}

// Adds the exact queries of a pair to ITM_FAST_PART_SUMS, see turn_pair. Their attended vectors are formed again.
template <typename S>
ITM_FAST_DEVICE void add_exact_queries(const PairRows<S>& rows, const PairNumbers& numbers, bool is_context,
                                       const PartRange& range) {
  ITM_FAST_PART_SUMS(row_sums);
  const int column = thread_index();
  const int64_t of_rows = range.column + column;
  if (of_rows >= range.width) return;
  for (int j = 0; j < rows.n_queries; ++j) {
    if (numbers.exact[j] == 0.0f) continue;
    const auto attention = [&](int k) { return numbers.kept_attention<RowParts<S>::kOfCoefficients>(j, k); };
    float attended = 0.0f;
    for (int k = 0; k < rows.n_contexts; ++k) attended += attention(k) * widen(rows.contexts[k * rows.dim + of_rows]);
    for (int row = 0; row < range.n_rows; ++row) {
      const int at = range.first_row + row, place = row * PartTile<S>::kSumStride + column;
      if (is_context) {
        row_sums[place] += attention(at) * numbers.square[j] * attended;
      } else if (at == j) {
        row_sums[place] += numbers.dot[j] * attended;
      }
    }
  }
}

// The sets that need a gradient, contexts first.
template <typename S>
ITM_FAST_DEVICE int64_t context_destinations(const CrossAttentionBackward<S>& p) {
  return p.context_gradients != nullptr ? p.lists.contexts.n_sets : 0;
}
template <typename S>
ITM_FAST_DEVICE int64_t destinations(const CrossAttentionBackward<S>& p) {
  return context_destinations(p) + (p.query_gradients != nullptr ? p.lists.queries.n_sets : 0);
}
template <typename S>
ITM_FAST_DEVICE Destination<S> destination_of(const CrossAttentionBackward<S>& p, int64_t number) {
  const int64_t n_contexts = context_destinations(p);
  return number < n_contexts ? destination_context(p, number) : destination_query(p, number - n_contexts);
}

constexpr int64_t slices_of(int64_t dim) { return tiles_of(dim, PartTile<float>::kColumns); }

// Step 4 for a set's rows and a slice of the columns. If the numbers of a pair have no place, the gradients of its sets
// become NaN.
template <bool kAligned, typename S>
ITM_FAST_DEVICE void accumulate_rows(const CrossAttentionBackward<S>& p, const PairChunk& chunk, int number,
                                     int first_column) {
  const Destination<S> to = destination_of(p, number);
  constexpr int kParts = RowParts<S>::kOfCoefficients;
  ITM_FAST_SHARED(int32_t, zero_rows, PartTile<S>::kRows);
  const ListedEntries entries = entries_of(p, chunk, to);
  if (entries.first == entries.last && !chunk.is_first && !chunk.is_last) return;
  // A context set has one more term: its rows themselves.
  const bool has_squares =
      to.is_context && entries.first < entries.last && p.template gram_of<kParts>(to.set).first != nullptr;
  for (int first_row = 0; first_row < to.n_rows; first_row += PartTile<S>::kRows) {
    const int count = static_cast<int>(smaller(PartTile<S>::kRows, to.n_rows - first_row));
    const int dim = static_cast<int>(p.dim);
    const PartRange range{first_row, count, first_column, dim, dim, static_cast<int>(padded_parts(to.n_rows))};
    for (int row = warp(); row < count; row += kGradientWarps) {
      const bool is_zero = is_zero_row(to.values + (first_row + row) * p.dim, p.dim);
      if (lane() == 0) zero_rows[row] = is_zero ? 1 : 0;
    }
    bool is_incomplete = false, has_exact = false;  // of the pairs that this lane looks up
    const int32_t last = entries.last + (has_squares ? 1 : 0);
    sum_parts<kAligned, PartTile<S>>(range, entries.first, last, [&](int32_t entry) -> PartTerm<S> {
      const Destination<S> to = destination_of(p, number);  // Looked up again: the sums need the registers.
      if (entry == entries.last) return {p.template gram_of<kParts>(to.set).first, to.values, to.n_rows};
      const ListedPair pair = pair_of(p, to, entry);
      if (!has_place(p, chunk, pair)) {
        is_incomplete = true;
        return {reinterpret_cast<const uint16_t*>(p.numbers), to.values, 0};
      }
      const PairNumbers numbers = numbers_of(p, chunk, pair);
      has_exact = has_exact || *numbers.has_exact != 0.0f;
      const PairRows<S> rows = p.rows_of(pair);
      if (to.is_context) return {numbers.weights<kParts>().first, rows.queries, rows.n_queries};
      return {numbers.turned_weights<kParts>().first, rows.contexts, rows.n_contexts};
    });
    if (vote_any(has_exact)) {
      for (int32_t entry = entries.first; entry < entries.last; ++entry) {
        const ListedPair pair = pair_of(p, to, entry);
        if (!has_place(p, chunk, pair)) continue;
        const PairNumbers numbers = numbers_of(p, chunk, pair);
        if (*numbers.has_exact != 0.0f) add_exact_queries(p.rows_of(pair), numbers, to.is_context, range);
      }
    }
    const bool is_poisoned = vote_any(is_incomplete);
    const Destination<S> to = destination_of(p, number);
    const bool has_factors = !to.is_context && entries.first < entries.last;
    const float* factors = has_factors ? p.query_factors + p.lists.queries.offset(to.set) : nullptr;
    each_part_sum<S>(range, [&](int row, int column, float sum) {
      const int64_t at = (first_row + row) * p.dim + first_column + column;
      if (factors != nullptr) sum += factors[first_row + row] * widen(to.values[at]);
      if (is_poisoned) sum = kNotANumber;
      if (zero_rows[row] != 0) sum = 0.0f;
      if (!chunk.is_first) sum += to.sums[at];
      if (chunk.is_last) {
        narrow(sum, to.gradients[at]);
      } else {
        to.sums[at] = sum;
      }
    });
    barrier();  // The sums have been read.
  }
}

// Rows behind the last set have no gradient. The blocks share them.
template <typename S>
ITM_FAST_DEVICE void clear_rows_of_no_set(const SetRows<S>& rows, S* gradients, int64_t dim) {
  if (gradients == nullptr) return;
  const int64_t first = rows.offset(rows.n_sets) * dim + block_index() * kGradientThreads + thread_index();
  for (int64_t at = first; at < rows.n_rows * dim; at += grid_blocks() * kGradientThreads) narrow(0.0f, gradients[at]);
}

// The blocks share the sets that need a gradient, and the slices of their columns, in turn.
template <bool kAligned, typename S>
ITM_FAST_DEVICE void accumulate_gradients(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  const int n_slices = static_cast<int>(slices_of(p.dim));
  for (int task = static_cast<int>(block_index()); task < destinations(p) * n_slices;
       task += static_cast<int>(grid_blocks())) {
    const int number = task / n_slices;
    accumulate_rows<kAligned>(p, chunk, number, task % n_slices * PartTile<S>::kColumns);
  }
}

}  // namespace itm_fast::cuda
