// The pairs of a score matrix with a non-zero incoming gradient, listed on the device in one launch.
//
// A block lists the pairs of 32 context sets (lanes over the contexts, warps over runs of query sets) or of one query
// set per warp. Each list is in ascending order of sets. The last block to finish sums the lists, so that a pair knows
// its index and the place of its numbers. Lists have room for all pairs at fixed distances, so the host needs no
// counts. NaN counts as non-zero; a pair with an empty set has no gradient. A pair that needs more than `most_numbers`
// is listed without a place.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/part_matrix.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

// The gradients of the scores of all pairs. The scores of text-to-image attention have images as rows, so their
// gradients arrive transposed.
struct ScoreGradients {
  const float* values;
  int64_t query_stride, context_stride;

  ITM_FAST_DEVICE float at(int64_t query, int64_t context) const {
    return values[query * query_stride + context * context_stride];
  }
};

template <typename S>
struct PairLists {
  ScoreGradients gradients;
  SetRows<S> queries, contexts;
  int32_t* context_lists;    // (context sets, query sets): the query sets of each context set
  int32_t* context_counts;   // pairs of each context set
  int64_t* query_starts;     // (context sets, query sets), of listed pairs: numbers of the pairs before it in the list
  int64_t* context_numbers;  // numbers of all pairs of each context set
  int32_t* query_lists;      // (query sets, context sets); null if no query set needs its list
  int32_t* query_counts;
  int64_t *first_pair, *first_number;  // totals before each context set
  int64_t* total;                      // pairs: a result of the operator
  int64_t* total_numbers;
  int64_t most_numbers;  // that a pair may have
  uint64_t* largest;     // zero at first; then the most numbers of a pair that has a place
  int32_t* finished;     // zero
  // Gram matrices of the context sets, with padded_parts of a set's length in a row. Sets up to `sure_gram` contexts
  // have a place. Longer ones, up to `most_gram`, share what these leave of the room, in their order.
  int64_t* gram_starts;  // (context sets,): elements before a set's matrix; -1 without a place
  int64_t sure_gram, most_gram, gram_room;
  uint64_t* longest;  // zero at first; then the length of the longest set with a place

  ITM_FAST_DEVICE bool has_gradient(int64_t query, int64_t context) const {
    return gradients.at(query, context) != 0.0f;
  }
};

// Numbers kept of a pair: six and a half matrices, five vectors and a flag, see PairNumbers. A multiple of 16 bytes.
constexpr int64_t numbers_of_pair(int64_t n_queries, int64_t n_contexts) {
  return padded_parts(n_queries) * (padded_parts(n_contexts) / 2 * 13 + 5) + 4;
}

// A pair: its sets, and the place of its numbers among those of all pairs.
struct ListedPair {
  int64_t query, context;
  int64_t n_queries, n_contexts;
  int64_t start;

  ITM_FAST_DEVICE int64_t numbers() const { return numbers_of_pair(n_queries, n_contexts); }
};

template <typename S>
ITM_FAST_DEVICE ListedPair listed_pair(const PairLists<S>& p, int64_t query, int64_t context) {
  const int64_t before = p.query_starts[context * p.queries.n_sets + query];
  return {query, context, p.queries.length(query), p.contexts.length(context), p.first_number[context] + before};
}

// The last context set whose first index is not past `index`; `firsts` is in ascending order.
ITM_FAST_DEVICE int64_t context_of(const int64_t* firsts, int64_t n_contexts, int64_t index) {
  int64_t context = 0, end = n_contexts;
  while (context + 1 < end) {
    const int64_t middle = (context + end) / 2;
    if (firsts[middle] <= index) {
      context = middle;
    } else {
      end = middle;
    }
  }
  return context;
}

// The pair with an index below *p.total.
template <typename S>
ITM_FAST_DEVICE ListedPair numbered_pair(const PairLists<S>& p, int64_t number) {
  const int64_t context = context_of(p.first_pair, p.contexts.n_sets, number);
  return listed_pair(p, p.context_lists[context * p.queries.n_sets + (number - p.first_pair[context])], context);
}

// The first entry of a list whose pair starts at `bound` or later; pair_at(entry) is in ascending order.
template <typename PairAt>
ITM_FAST_DEVICE int32_t first_entry_from(int32_t count, int64_t bound, const PairAt& pair_at) {
  int32_t first = 0, end = count;
  while (first < end) {
    const int32_t middle = first + (end - first) / 2;
    if (pair_at(middle).start < bound) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first;
}

// The index of the first pair that starts at `bound` or later.
template <typename S>
ITM_FAST_DEVICE int64_t first_pair_from(const PairLists<S>& p, int64_t bound) {
  const int64_t context = context_of(p.first_number, p.contexts.n_sets, bound);
  const int32_t* list = p.context_lists + context * p.queries.n_sets;
  return p.first_pair[context] + first_entry_from(p.context_counts[context], bound,
                                                  [&](int32_t entry) { return listed_pair(p, list[entry], context); });
}

// Warps share the query sets, and each examines its own in order. Fewer threads sum up the results, because each
// of these threads reads the results of all before it.
inline constexpr int kListWarps = 16, kListThreads = 32 * kListWarps, kListedContexts = 32, kAddingThreads = 128;

// Lists the pairs of context sets [first, first + 32).
template <typename S>
ITM_FAST_DEVICE void list_contexts(const PairLists<S>& p, int64_t first) {
  ITM_FAST_SHARED(int32_t, counts_of_warps, kListThreads);
  ITM_FAST_SHARED(int64_t, numbers_of_warps, kListThreads);
  const int64_t context = first + lane(), n_queries = p.queries.n_sets;
  const int64_t n_contexts = context < p.contexts.n_sets ? p.contexts.length(context) : 0;
  const auto numbers_with = [&](int64_t length) {
    const int64_t count = numbers_of_pair(length, n_contexts);
    return count <= p.most_numbers ? count : 0;
  };
  const int64_t run = (n_queries + kListWarps - 1) / kListWarps;
  const int64_t begin = warp() * run, end = smaller(begin + run, n_queries);
  const int64_t stride = p.gradients.query_stride;
  const float* const gradients = p.gradients.values + begin * stride + context * p.gradients.context_stride;
  const auto is_listed = [&](int64_t length, const float* gradient) {
    return n_contexts > 0 && length > 0 && *gradient != 0.0f;
  };
  int32_t count = 0;
  int64_t numbers = 0, largest = 0;
  const float* gradient = gradients;
  for (int64_t query = begin; query < end; ++query, gradient += stride) {
    const int64_t length = p.queries.length(query);
    if (!is_listed(length, gradient)) continue;
    const int64_t more = numbers_with(length);
    ++count;
    numbers += more;
    if (more > largest) largest = more;
  }
  counts_of_warps[thread_index()] = count;
  numbers_of_warps[thread_index()] = numbers;
  barrier();
  int32_t at = 0;
  numbers = 0;
  for (int w = 0; w < warp(); ++w) {
    at += counts_of_warps[w * 32 + lane()];
    numbers += numbers_of_warps[w * 32 + lane()];
  }
  gradient = gradients;
  for (int64_t query = begin; query < end; ++query, gradient += stride) {
    const int64_t length = p.queries.length(query);
    if (!is_listed(length, gradient)) continue;
    p.context_lists[context * n_queries + at] = static_cast<int32_t>(query);
    p.query_starts[context * n_queries + query] = numbers;
    ++at;
    numbers += numbers_with(length);
  }
  if (largest > 0) atomic_max(p.largest, static_cast<uint64_t>(largest));
  if (warp() == kListWarps - 1 && context < p.contexts.n_sets) {
    p.context_counts[context] = at;
    p.context_numbers[context] = numbers;
  }
}

// Lists the pairs of one query set; for the whole warp.
template <typename S>
ITM_FAST_DEVICE void list_query(const PairLists<S>& p, int64_t query) {
  const bool present = p.queries.length(query) > 0;
  int32_t count = 0;
  for (int64_t first = 0; first < p.contexts.n_sets; first += 32) {
    const int64_t context = first + lane();
    const bool listed =
        present && context < p.contexts.n_sets && p.contexts.length(context) > 0 && p.has_gradient(query, context);
    const uint32_t lanes = ballot(listed);
    const int before = count_bits(lanes & ((uint32_t{1} << lane()) - 1));
    if (listed) p.query_lists[query * p.contexts.n_sets + count + before] = static_cast<int32_t>(context);
    count += count_bits(lanes);
  }
  if (lane() == 0) p.query_counts[query] = count;
}

// The elements of a context set's Gram matrix, if it is of those that have a place, or of those that may have one.
template <typename S>
ITM_FAST_DEVICE int64_t gram_size(const PairLists<S>& p, int64_t context, bool is_sure) {
  const int64_t length = p.contexts.length(context);
  if (length > p.most_gram || (length <= p.sure_gram) != is_sure) return 0;
  return length * padded_parts(length);
}

// Sums the lists of the context sets: thread t sums a run of sets, then each run adds the runs before it. The same for
// the places of Gram matrices.
template <typename S>
ITM_FAST_DEVICE void add_up_lists(const PairLists<S>& p) {
  ITM_FAST_SHARED(int64_t, pairs_of_runs, kAddingThreads);
  ITM_FAST_SHARED(int64_t, numbers_of_runs, kAddingThreads);
  ITM_FAST_SHARED(int64_t, sure_of_runs, kAddingThreads);
  ITM_FAST_SHARED(int64_t, others_of_runs, kAddingThreads);
  const bool adds = thread_index() < kAddingThreads;
  const int64_t n_sets = p.contexts.n_sets, run = (n_sets + kAddingThreads - 1) / kAddingThreads;
  const int64_t begin = adds ? smaller(thread_index() * run, n_sets) : n_sets, end = smaller(begin + run, n_sets);
  int64_t pairs = 0, numbers = 0, sure = 0, others = 0;
  for (int64_t context = begin; context < end; ++context) {
    pairs += load_coherent(p.context_counts + context);
    numbers += load_coherent(p.context_numbers + context);
    sure += gram_size(p, context, true);
    others += gram_size(p, context, false);
  }
  if (adds) {
    pairs_of_runs[thread_index()] = pairs;
    numbers_of_runs[thread_index()] = numbers;
    sure_of_runs[thread_index()] = sure;
    others_of_runs[thread_index()] = others;
  }
  barrier();
  if (!adds) return;
  pairs = numbers = sure = others = 0;
  for (int t = 0; t < kAddingThreads; ++t) {
    const bool is_before = t < thread_index();
    pairs += is_before ? static_cast<int64_t>(pairs_of_runs[t]) : 0;
    numbers += is_before ? static_cast<int64_t>(numbers_of_runs[t]) : 0;
    sure += is_before ? static_cast<int64_t>(sure_of_runs[t]) : 0;
    others += is_before ? others_of_runs[t] + sure_of_runs[t] : static_cast<int64_t>(sure_of_runs[t]);
  }
  uint64_t longest = 0;
  for (int64_t context = begin; context < end; ++context) {
    p.first_pair[context] = pairs;
    p.first_number[context] = numbers;
    pairs += load_coherent(p.context_counts + context);
    numbers += load_coherent(p.context_numbers + context);
    const int64_t length = p.contexts.length(context);
    int64_t& before = length <= p.sure_gram ? sure : others;
    const int64_t size = gram_size(p, context, length <= p.sure_gram);
    const bool has_place = length <= p.most_gram && before + size <= p.gram_room;
    p.gram_starts[context] = has_place ? before : -1;
    before += size;
    if (has_place && static_cast<uint64_t>(length) > longest) longest = static_cast<uint64_t>(length);
  }
  if (longest > 0) atomic_max(p.longest, longest);
  if (thread_index() == kAddingThreads - 1) {
    *p.total = pairs;
    *p.total_numbers = numbers;
  }
}

constexpr int64_t list_blocks_of_contexts(int64_t n_contexts) { return tiles_of(n_contexts, kListedContexts); }

// Grid: list_blocks_of_contexts, then, if query sets need their lists, one block per kListWarps query sets.
template <typename S>
ITM_FAST_DEVICE void list_pairs(const PairLists<S>& p) {
  ITM_FAST_SHARED(int32_t, is_last, 1);
  const int64_t context_blocks = list_blocks_of_contexts(p.contexts.n_sets);
  int64_t blocks = context_blocks;
  if (p.query_lists != nullptr) blocks += tiles_of(p.queries.n_sets, kListWarps);
  if (block_index() < context_blocks) {
    list_contexts(p, block_index() * kListedContexts);
  } else {
    const int64_t query = (block_index() - context_blocks) * kListWarps + warp();
    if (query < p.queries.n_sets) list_query(p, query);
  }
  memory_fence();
  barrier();
  if (thread_index() == 0) is_last[0] = atomic_add(p.finished, 1) == blocks - 1;
  barrier();
  if (is_last[0] == 0) return;
  memory_fence();
  add_up_lists(p);
}

}  // namespace itm_fast::cuda
