// The backward of cross_attention_scores on a GPU: two launches.
//
// list_pairs (pair_lists.h) finds the pairs with a score gradient. backpropagate_pairs then takes as many of them at a
// time as their numbers have room for, and computes, with a barrier of the grid after each step:
//
// 1. the Gram matrices of their context sets;
// 2. the numbers of each pair, with a block per pair (pair_gradient.h): W, p and the factors of the attended vectors;
// 3. the sums over a set's list that do not depend on the columns: of the context-by-context matrices
//    p' diag(square) p, in place of the Gram matrix, and of the factors of the queries;
// 4. the gradients, sums of rows with coefficients (part_sums.h): dX = sum_pairs W' Q + (sum of step 3) X for a context
//    set and dQ = sum_pairs W X + diag(sum of step 3) Q for a query set.
//
// All products are on tensor cores. Each sum is in the order of the set's list, without atomics, so results do not
// depend on the order of blocks or threads, nor on their number. If most pairs have a gradient, backpropagate_blocks
// (block_gradients.h) takes the place of these steps. With K contexts, n queries and width d, a pair takes
// 3 K n d multiply-adds, and its context set 2 K K d. A list with a pair for every set is no bottleneck: its pairs are
// separate tasks, and its sums are split by columns.
#pragma once

#include "itm_fast/cuda/block_gradients.h"
#include "itm_fast/cuda/pair_gradient.h"
#include "itm_fast/cuda/set_gradients.h"

namespace itm_fast::cuda {

// Step 1. The blocks share the context sets of the chunk, and runs of their rows, in turn. Sets without a pair get no
// matrix.
template <typename S>
ITM_FAST_DEVICE void write_grams(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  const int64_t runs = tiles_of(p.gram_contexts(), SetTile::kRows);
  const int64_t tasks = (chunk.last_context - chunk.first_context) * runs;
  for (int64_t task = block_index(); task < tasks; task += grid_blocks()) {
    const int64_t set = chunk.first_context + task / runs;
    const int first = static_cast<int>(task % runs) * SetTile::kRows,
              n = static_cast<int>(p.lists.contexts.length(set));
    const PartMatrix<kMatrixParts> gram = p.gram_of(set);
    if (gram.first == nullptr || p.lists.context_counts[set] == 0 || first >= n) continue;
    const S* rows = p.lists.contexts.values + p.lists.contexts.offset(set) * p.dim;
    each_product(rows + first * p.dim, static_cast<int>(smaller(SetTile::kRows, n - first)), rows, n, p.dim,
                 p.is_aligned, [&](int k, int l, float product) { gram.store(first + k, l, product); });
  }
}

// Step 2. The blocks share the pairs of the chunk in turn.
template <typename S>
ITM_FAST_DEVICE void differentiate_pairs(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  for (int64_t number = chunk.first_pair + block_index(); number < chunk.last_pair; number += grid_blocks()) {
    const ListedPair pair = numbered_pair(p.lists, number);
    if (!has_place(p, chunk, pair)) continue;
    differentiate_pair(p.rows_of(pair), p.gradient_of(pair), p.options, p.attended_of_block(),
                       numbers_of(p, chunk, pair));
  }
}

// Grid: blocks that are resident together.
template <typename S>
ITM_FAST_DEVICE void backpropagate_pairs(const CrossAttentionBackward<S>& p) {
  ITM_FAST_SHARED(PairChunk, chunk, 1);  // It would take the registers of the sums.
  ITM_FAST_SHARED(int32_t, rounds, 1);   // of the barrier, before those of the lists
  if (thread_index() == 0) {
    chunk[0] = chunk_of(p.lists, PairChunks(p), 0);
    rounds[0] = 0;
  }
  clear_rows_of_no_set(p.lists.queries, p.query_gradients, p.dim);
  clear_rows_of_no_set(p.lists.contexts, p.context_gradients, p.dim);
  barrier();
  if (takes_blocks(p)) {
    const int32_t passed = backpropagate_blocks(p);
    if (passed == 0) return;
    if (thread_index() == 0) rounds[0] = passed;
    barrier();
  }
  while (true) {
    const auto wait = [&](int step) {
      grid_barrier(p.arrived, rounds[0] + static_cast<PairChunk>(chunk[0]).index * 4 + step);
    };
    write_grams<S>(p, chunk[0]);
    wait(1);
    differentiate_pairs<S>(p, chunk[0]);
    wait(2);
    sum_lists<S>(p, chunk[0]);
    wait(3);
    if (p.is_aligned) {
      accumulate_gradients<true, S>(p, chunk[0]);
    } else {
      accumulate_gradients<false, S>(p, chunk[0]);
    }
    if (static_cast<PairChunk>(chunk[0]).is_last) return;
    wait(4);  // The numbers of the chunk have been read.
    if (thread_index() == 0) {
      chunk[0] = chunk_of(p.lists, PairChunks(p), static_cast<PairChunk>(chunk[0]).index + 1);
    }
    barrier();
  }
}

}  // namespace itm_fast::cuda
