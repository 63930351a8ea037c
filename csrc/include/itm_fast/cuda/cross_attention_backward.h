// The backward of cross_attention_scores on a GPU: two launches.
//
// list_pairs (pair_lists.h) finds the pairs with a score gradient. backpropagate_pairs then takes as many of them at a
// time as their numbers have room for, and computes, with a barrier of the grid after each step:
//
// 1. the Gram matrices of their context sets;
// 2. the numbers of each pair, with a block per pair (pair_gradient.h): W, p and the factors of the attended vectors;
// 3. the sums over a set's list that do not depend on the columns: of the context-by-context matrices
//    p' diag(square) p, in place of the Gram matrix, and of the factors of the queries;
// 4. the gradients, sums of rows with coefficients (row_sums.h): dX = sum_pairs W' Q + (sum of step 3) X for a context
//    set and dQ = sum_pairs W X + diag(sum of step 3) Q for a query set.
//
// All products are on tensor cores. Each sum is in the order of the set's list, without atomics, so results do not
// depend on the order of blocks or threads, nor on their number. With K contexts, n queries and width d, a pair takes
// 3 K n d multiply-adds, and its context set K K d. A list with a pair for every set is no bottleneck: its pairs are
// separate tasks, and its sums are split by columns.
#pragma once

#include "itm_fast/cuda/pair_gradient.h"
#include "itm_fast/cuda/set_gradients.h"

namespace itm_fast::cuda {

// Step 1. The blocks share the context sets of the chunk in turn. Sets without a pair get no matrix.
template <typename S>
ITM_FAST_DEVICE void write_grams(const CrossAttentionBackward<S>& p, const PairChunk& chunk) {
  for (int64_t set = chunk.first_context + block_index(); set < chunk.last_context; set += grid_blocks()) {
    float* gram = p.gram_of(set);
    if (gram == nullptr || p.lists.context_counts[set] == 0) continue;
    const S* rows = p.lists.contexts.values + p.lists.contexts.offset(set) * p.dim;
    const int n = static_cast<int>(p.lists.contexts.length(set));
    each_product(rows, n, rows, n, p.dim, p.is_aligned,
                 [&](int k, int l, float product) { gram[k * padded(n) + l] = product; });
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
  const PairChunks chunks(p);
  int32_t round = 0;
  for (int64_t i = 0; i < chunks.count; ++i) {
    if (i > 0) grid_barrier(p.arrived, ++round);  // The numbers of the last chunk have been read.
    const PairChunk chunk = chunk_of(p.lists, chunks, i);
    write_grams(p, chunk);
    grid_barrier(p.arrived, ++round);
    differentiate_pairs(p, chunk);
    grid_barrier(p.arrived, ++round);
    sum_lists(p, chunk);
    grid_barrier(p.arrived, ++round);
    if (p.is_aligned) {
      accumulate_gradients<true>(p, chunk);
    } else {
      accumulate_gradients<false>(p, chunk);
    }
  }
}

}  // namespace itm_fast::cuda
