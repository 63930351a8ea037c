// The pairs of a score matrix with a non-zero incoming gradient, listed on the device in one launch.
//
// A block lists the pairs of 32 context sets (lanes over the contexts, warps over runs of query sets) or of one query
// set per warp. Each list is in ascending order of sets. The last block to finish sums the lists, so that a pair knows
// its index and the offset of its numbers. Lists have room for all pairs at fixed distances, so the host needs no
// counts. NaN counts as non-zero; a pair with an empty set has no gradient.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

template <typename S>
struct PairLists {
  const float* gradients;  // (query sets, context sets), dense
  SetRows<S> queries, contexts;
  int32_t* context_lists;   // (context sets, query sets): the query sets of each context set
  int32_t* context_counts;  // pairs of each context set
  int64_t* query_starts;  // (context sets, query sets), of listed pairs: query rows of the pairs before it in the list
  int64_t* context_rows;  // query rows of all pairs of each context set
  int32_t* query_lists;   // (query sets, context sets); null if no query set needs its list
  int32_t* query_counts;
  // Totals before each context set, and of all: pairs, their query rows, and their raw scores.
  int64_t *first_pair, *first_row, *first_score;
  int64_t* total;         // pairs: a result of the operator
  uint64_t* most_scores;  // zero at first; then the most raw scores of a pair
  uint64_t* most_rows;    // zero at first; then the most query rows of a pair
  int32_t* finished;      // zero

  ITM_FAST_DEVICE bool has_gradient(int64_t query, int64_t context) const {
    return gradients[query * contexts.n_sets + context] != 0.0f;
  }
};

// A pair: its sets, and the query rows and raw scores of listed pairs before it.
struct ListedPair {
  int64_t query, context;
  int64_t n_queries, n_contexts;
  int64_t row, score;
};

template <typename S>
ITM_FAST_DEVICE ListedPair listed_pair(const PairLists<S>& p, int64_t query, int64_t context) {
  ListedPair pair{query, context, p.queries.length(query), p.contexts.length(context), 0, 0};
  const int64_t before = p.query_starts[context * p.queries.n_sets + query];
  pair.row = p.first_row[context] + before;
  pair.score = p.first_score[context] + before * pair.n_contexts;
  return pair;
}

// The pair with an index below *p.total.
template <typename S>
ITM_FAST_DEVICE ListedPair numbered_pair(const PairLists<S>& p, int64_t number) {
  int64_t context = 0, end = p.contexts.n_sets;  // The last context set whose first pair is not past the number.
  while (context + 1 < end) {
    const int64_t middle = (context + end) / 2;
    if (p.first_pair[middle] <= number) {
      context = middle;
    } else {
      end = middle;
    }
  }
  const int32_t query = p.context_lists[context * p.queries.n_sets + (number - p.first_pair[context])];
  return listed_pair(p, query, context);
}

// Warps share the query sets, and each examines its own in order. Fewer threads sum up the results, because each
// of these threads reads the results of all before it.
inline constexpr int kListWarps = 16, kListThreads = 32 * kListWarps, kListedContexts = 32, kAddingThreads = 128;

// Lists the pairs of context sets [first, first + 32).
template <typename S>
ITM_FAST_DEVICE void list_contexts(const PairLists<S>& p, int64_t first) {
  ITM_FAST_SHARED(int32_t, counts_of_warps, kListThreads);
  ITM_FAST_SHARED(int64_t, rows_of_warps, kListThreads);
  const int64_t context = first + lane(), n_queries = p.queries.n_sets;
  const bool present = context < p.contexts.n_sets && p.contexts.length(context) > 0;
  const int64_t run = (n_queries + kListWarps - 1) / kListWarps;
  const int64_t begin = warp() * run, end = smaller(begin + run, n_queries);
  int32_t count = 0;
  int64_t rows = 0, longest = 0;
  for (int64_t query = begin; query < end; ++query) {
    const int64_t length = p.queries.length(query);
    if (!present || length == 0 || !p.has_gradient(query, context)) continue;
    ++count;
    rows += length;
    if (length > longest) longest = length;
  }
  counts_of_warps[thread_index()] = count;
  rows_of_warps[thread_index()] = rows;
  barrier();
  int32_t at = 0;
  rows = 0;
  for (int w = 0; w < warp(); ++w) {
    at += counts_of_warps[w * 32 + lane()];
    rows += rows_of_warps[w * 32 + lane()];
  }
  for (int64_t query = begin; query < end; ++query) {
    const int64_t length = p.queries.length(query);
    if (!present || length == 0 || !p.has_gradient(query, context)) continue;
    p.context_lists[context * n_queries + at] = static_cast<int32_t>(query);
    p.query_starts[context * n_queries + query] = rows;
    ++at;
    rows += length;
  }
  if (longest > 0) {
    atomic_max(p.most_rows, static_cast<uint64_t>(longest));
    atomic_max(p.most_scores, static_cast<uint64_t>(longest * p.contexts.length(context)));
  }
  if (warp() == kListWarps - 1 && context < p.contexts.n_sets) {
    p.context_counts[context] = at;
    p.context_rows[context] = rows;
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

// Sums the lists of the context sets: thread t sums a run of sets, then each run adds the runs before it.
template <typename S>
ITM_FAST_DEVICE void add_up_lists(const PairLists<S>& p) {
  ITM_FAST_SHARED(int64_t, pairs_of_runs, kAddingThreads);
  ITM_FAST_SHARED(int64_t, rows_of_runs, kAddingThreads);
  ITM_FAST_SHARED(int64_t, scores_of_runs, kAddingThreads);
  const bool adds = thread_index() < kAddingThreads;
  const int64_t n_sets = p.contexts.n_sets, run = (n_sets + kAddingThreads - 1) / kAddingThreads;
  const int64_t begin = adds ? smaller(thread_index() * run, n_sets) : n_sets, end = smaller(begin + run, n_sets);
  int64_t pairs = 0, rows = 0, scores = 0;
  for (int64_t context = begin; context < end; ++context) {
    const int64_t of_context = load_coherent(p.context_rows + context);
    pairs += load_coherent(p.context_counts + context);
    rows += of_context;
    scores += of_context * p.contexts.length(context);
  }
  if (adds) {
    pairs_of_runs[thread_index()] = pairs;
    rows_of_runs[thread_index()] = rows;
    scores_of_runs[thread_index()] = scores;
  }
  barrier();
  if (!adds) return;
  pairs = rows = scores = 0;
  for (int t = 0; t < thread_index(); ++t) {
    pairs += pairs_of_runs[t];
    rows += rows_of_runs[t];
    scores += scores_of_runs[t];
  }
  for (int64_t context = begin; context < end; ++context) {
    p.first_pair[context] = pairs;
    p.first_row[context] = rows;
    p.first_score[context] = scores;
    const int64_t of_context = load_coherent(p.context_rows + context);
    pairs += load_coherent(p.context_counts + context);
    rows += of_context;
    scores += of_context * p.contexts.length(context);
  }
  if (thread_index() == kAddingThreads - 1) *p.total = pairs;
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
