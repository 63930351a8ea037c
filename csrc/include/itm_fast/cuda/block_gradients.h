// The gradients of the rows from blocks of scores: the last steps of backpropagate_blocks, and all of them in order.
#pragma once

#include "itm_fast/cuda/block_scores.h"
#include "itm_fast/cuda/block_tasks.h"
#include "itm_fast/cuda/set_gradients.h"

namespace itm_fast::cuda {

// One of the two products of a chunk: sums (n_rows, dim) += coefficients' rows, of `depth` rows.
template <typename S>
struct BlockProduct {
  PartMatrix<RowParts<S>::kOfCoefficients> coefficients;  // (depth, n_rows)
  const S* rows;
  float* sums;
  int n_rows, depth;
  bool is_first;  // The sums are not read.

  ITM_FAST_DEVICE int64_t tasks(int64_t dim) const {
    return n_rows == 0 ? 0 : tiles_of(n_rows, BlockSums<S>::kRows) * tiles_of(dim, BlockSums<S>::kColumns);
  }
};

// 128 rows and columns of a product. A separate function, so that a kernel holds one copy of it.
template <bool kAligned, typename S>
ITM_FAST_DEVICE_APART void multiply_block(const BlockProduct<S>& product, int dim, int64_t task) {
  using Tile = BlockSums<S>;
  const int across = static_cast<int>(tiles_of(dim, Tile::kColumns));
  const int first_row = static_cast<int>(task / across) * Tile::kRows,
            column = static_cast<int>(task % across) * Tile::kColumns;
  const PartRange range{first_row, static_cast<int>(smaller(Tile::kRows, product.n_rows - first_row)),
                        column,    dim,
                        dim,       product.coefficients.stride};
  const PartTerm<S> term{product.coefficients.first, product.rows, product.depth};
  const int thread = thread_index();
  WarpPartSums<Tile> sums(thread);
  add_terms<kAligned>(sums, range, 0, 1, [&](int32_t) { return term; }, thread);
  float* target = product.sums + int64_t{first_row} * dim + column;
  sums.each(range.n_rows, dim - column, [&](int row, int c, float sum) {
    if (row >= range.n_rows || c >= dim - column) return;
    float& found = target[int64_t{row} * dim + c];
    found = product.is_first ? sum : found + sum;
  });
}

// Step 3: both products of a chunk, the deeper one first.
template <bool kAligned, typename S>
ITM_FAST_DEVICE void multiply_blocks(const CrossAttentionBackward<S>& p, const BlockChunk<S>& chunk) {
  const TileRun &contexts = chunk.contexts, &queries = chunk.queries;
  const S* context_rows = p.lists.contexts.values + contexts.first_row * p.dim;
  const S* query_rows = p.lists.queries.values + queries.first_row * p.dim;
  BlockProduct<S> of_queries{chunk.turned,   context_rows,    nullptr,
                             queries.n_rows, contexts.n_rows, chunk.is_first_of_queries};
  BlockProduct<S> of_contexts{chunk.weights,   query_rows,     nullptr,
                              contexts.n_rows, queries.n_rows, chunk.is_first_of_contexts};
  if (p.query_gradients != nullptr) {
    of_queries.sums = p.query_sums + queries.first_row * p.dim;
  } else {
    of_queries.n_rows = 0;
  }
  if (p.context_gradients != nullptr) {
    of_contexts.sums = p.context_sums + contexts.first_row * p.dim;
  } else {
    of_contexts.n_rows = 0;
  }
  const bool queries_first = of_queries.depth >= of_contexts.depth;
  const BlockProduct<S>&longest = queries_first ? of_queries : of_contexts,
        &other = queries_first ? of_contexts : of_queries;
  const int64_t of_longest = longest.tasks(p.dim);
  BlockTasks(p.taken).share(of_longest + other.tasks(p.dim), [&](int64_t task) {
    const bool is_longest = task < of_longest;
    multiply_block<kAligned>(is_longest ? longest : other, static_cast<int>(p.dim),
                             is_longest ? task : task - of_longest);
  });
}

// Step 3, too: the sums of the tiles' terms. M goes to the place of the Gram matrices when it is complete.
template <typename S>
ITM_FAST_DEVICE void add_tile_sums(const CrossAttentionBackward<S>& p, const BlockChunk<S>& chunk) {
  const TileRun &contexts = chunk.contexts, &queries = chunk.queries;
  const int64_t first = block_index() * kGradientThreads + thread_index(), apart = grid_blocks() * kGradientThreads;
  if (p.query_gradients != nullptr) {
    for (int64_t row = first; row < queries.n_rows; row += apart) {
      float sum = chunk.is_first_of_queries ? 0.0f : p.query_factors[queries.first_row + row];
      for (int64_t tile = 0; tile < contexts.n_tiles(); ++tile) {
        sum += chunk.norms[tile * padded_parts(queries.n_rows) + row];
      }
      p.query_factors[queries.first_row + row] = sum;
    }
  }
  if (p.context_gradients == nullptr) return;
  for (int64_t set = contexts.first_set + block_index(); set < contexts.end_set; set += grid_blocks()) {
    const int n = static_cast<int>(p.lists.contexts.length(set));
    const int64_t first_row = p.lists.contexts.offset(set) - contexts.first_row;
    const PartMatrix<BlockChunk<S>::kParts> matrix = p.template gram_of<BlockChunk<S>::kParts>(set);
    for (int i = thread_index(); i < n * n; i += kGradientThreads) {
      const int64_t at = (first_row + i / n) * chunk.width + i % n;
      float sum = chunk.is_first_of_contexts ? 0.0f : chunk.squares_of(0)[at];
      for (int64_t tile = 0; tile < queries.n_tiles(); ++tile) sum += chunk.squares_of(1 + tile)[at];
      if (chunk.is_last_of_contexts) {
        matrix.store(i / n, i % n, sum);
      } else {
        chunk.squares_of(0)[at] = sum;
      }
    }
  }
}

// Step 4, after the last chunk of its contexts: M X, and the sums of the chunks. Rows of zeros have no gradient. A
// separate function, so that its registers are its own.
template <bool kAligned, typename S>
ITM_FAST_DEVICE_APART void finish_contexts(const CrossAttentionBackward<S>& p, const TileRun& run) {
  constexpr int kParts = RowParts<S>::kOfCoefficients;
  ITM_FAST_SHARED(int32_t, is_zero, PartTile<S>::kRows);
  const int64_t n_slices = slices_of(p.dim), tasks = (run.end_set - run.first_set) * n_slices;
  for (int64_t task = block_index(); task < tasks; task += grid_blocks()) {
    const int64_t set = run.first_set + task / n_slices, start = p.lists.contexts.offset(set) * p.dim;
    const int n = static_cast<int>(p.lists.contexts.length(set)), dim = static_cast<int>(p.dim);
    const int column = static_cast<int>(task % n_slices) * PartTile<S>::kColumns;
    const PartMatrix<kParts> matrix = p.template gram_of<kParts>(set);
    const S* values = p.lists.contexts.values + start;
    for (int first_row = 0; first_row < n; first_row += PartTile<S>::kRows) {
      const PartRange range{
          first_row, static_cast<int>(smaller(PartTile<S>::kRows, n - first_row)), column, dim, dim, matrix.stride};
      for (int row = warp(); row < range.n_rows; row += kGradientWarps) {
        const bool found = is_zero_row(values + (first_row + row) * p.dim, p.dim);
        if (lane() == 0) is_zero[row] = found ? 1 : 0;
      }
      sum_parts<kAligned, PartTile<S>>(range, 0, 1, [&](int32_t) -> PartTerm<S> { return {matrix.first, values, n}; });
      each_part_sum<S>(range, [&](int row, int c, float sum) {
        const int64_t at = start + (first_row + row) * p.dim + column + c;
        narrow(is_zero[row] != 0 ? 0.0f : p.context_sums[at] + sum, p.context_gradients[at]);
      });
      barrier();  // The sums have been read.
    }
  }
}

// Step 5: the sums of the chunks, and the queries with their factors; a warp per row.
template <typename S>
ITM_FAST_DEVICE void finish_queries(const CrossAttentionBackward<S>& p) {
  const SetRows<S>& sets = p.lists.queries;
  const int64_t n_rows = sets.offset(sets.n_sets);
  for (int64_t row = block_index() * kGradientWarps + warp(); row < n_rows; row += grid_blocks() * kGradientWarps) {
    const S* values = sets.values + row * p.dim;
    const bool is_zero = is_zero_row(values, p.dim);
    const float factor = p.query_factors[row];
    for (int64_t column = lane(); column < p.dim; column += 32) {
      const int64_t at = row * p.dim + column;
      narrow(is_zero ? 0.0f : p.query_sums[at] + factor * widen(values[column]), p.query_gradients[at]);
    }
  }
}

template <bool kAligned, typename S>
ITM_FAST_DEVICE void backpropagate_chunk(const CrossAttentionBackward<S>& p, const BlockChunk<S>& chunk) {
  add_tile_sums(p, chunk);
  multiply_blocks<kAligned>(p, chunk);
}

// Whether the gradient is dense enough for blocks of scores.
template <typename S>
ITM_FAST_DEVICE bool takes_blocks(const CrossAttentionBackward<S>& p) {
  const int64_t pairs = p.lists.queries.n_sets * p.lists.contexts.n_sets;
  return p.dense_share < 1.0f && static_cast<float>(*p.lists.total) > p.dense_share * static_cast<float>(pairs);
}

// All gradients, from blocks of scores. Returns 0, or the number of barriers if it leaves the gradients to the lists:
// for sets longer than a tile, attended vectors that cancel, numbers that are not finite, or too little room. A
// separate function, as are its steps, so that the registers of each are its own.
template <typename S>
ITM_FAST_DEVICE_APART int32_t backpropagate_blocks(const CrossAttentionBackward<S>& p) {
  int32_t rounds = 0;
  const auto wait = [&] { grid_barrier(p.arrived, ++rounds); };
  prepare_blocks(p);
  wait();
  if (load_coherent(p.unsuitable) != 0) return rounds;
  wait();  // A block that is ahead may find its first tile unsuitable.
  const BlockChunks chunks(p);
  if (chunks.across == 0) return rounds;
  for (int64_t across = 0; across < chunks.across; ++across) {
    for (int64_t down = 0; down < chunks.down; ++down) {
      const BlockChunk<S> chunk(p, chunks, across, down);
      BlockTasks::restart(p.taken);
      const int64_t wide = chunk.queries.n_tiles(), tasks = chunk.contexts.n_tiles() * wide;
      for (int64_t task = block_index(); task < tasks; task += grid_blocks()) {
        differentiate_scores(p, chunk, chunk.contexts.first_tile + task / wide, chunk.queries.first_tile + task % wide);
      }
      wait();
      if (load_coherent(p.unsuitable) != 0) return rounds;
      if (p.is_aligned) {
        backpropagate_chunk<true>(p, chunk);
      } else {
        backpropagate_chunk<false>(p, chunk);
      }
      wait();
    }
    const TileRun contexts(p.lists.contexts, p.context_tiles, across, chunks.context_tiles);
    if (p.context_gradients == nullptr) continue;
    if (p.is_aligned) {
      finish_contexts<true>(p, contexts);
    } else {
      finish_contexts<false>(p, contexts);
    }
  }
  if (p.query_gradients != nullptr) finish_queries(p);
  return 0;
}

}  // namespace itm_fast::cuda
