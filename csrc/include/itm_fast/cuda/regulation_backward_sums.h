// Backward of regulated cross-attention on a GPU: what the tiles of a chunk add to the gradients of weights, contexts
// and queries, in the order of the tiles.
//
// Gradients of weights are products of the turned gradients and the inputs of a layer; those of contexts are products
// of attention and gradients of attended vectors, and of the gradients of raw scores and queries. Both are sums of rows
// on tensor cores (row_sums.h). A number is added up by one block; for weights, by one block per part of the chunk.
#pragma once

#include "itm_fast/cuda/block_tasks.h"
#include "itm_fast/cuda/regulation_backward_tile.h"

namespace itm_fast::cuda {

// Adds sum_t A_t B_t of up to kRows x kColumns numbers to a gradient whose first row is at `out`.
template <typename TermAt>
ITM_FAST_DEVICE void add_row_sums(const SumRange& range, int64_t n_terms, float* out, const TermAt& term_at) {
  sum_rows(range, 0, static_cast<int32_t>(n_terms), term_at);
  each_row_sum(range, [&](int row, int column, float sum) {
    out[static_cast<int64_t>(range.first_row + row) * range.width + range.column + column] += sum;
  });
  barrier();  // The sums have been read.
}

constexpr int64_t row_blocks(int64_t rows) { return (rows + RowSumTile::kRows - 1) / RowSumTile::kRows; }
constexpr int64_t column_blocks(int64_t columns) { return (columns + RowSumTile::kColumns - 1) / RowSumTile::kColumns; }

ITM_FAST_DEVICE SumRange range_of(int64_t block, int64_t rows, int64_t columns, int64_t stride) {
  const int64_t first = block / column_blocks(columns) * RowSumTile::kRows, left = rows - first;
  return {static_cast<int>(first), static_cast<int>(left < RowSumTile::kRows ? left : RowSumTile::kRows),
          static_cast<int>(block % column_blocks(columns) * RowSumTile::kColumns), static_cast<int>(columns),
          static_cast<int>(stride)};
}

// Adds a part of the chunk's tiles to what the same part of the chunks before has given.
ITM_FAST_DEVICE_APART void add_to_weight(const RegulationBackward& p, TileChunk chunk, int64_t number, int64_t block,
                                         int part) {
  const WeightProduct product = weight_product(p, number);
  const int64_t n_tiles = chunk.end_tile - chunk.first_tile;
  const int64_t first = chunk.first_tile + n_tiles * part / kWeightParts;
  const int64_t end = chunk.first_tile + n_tiles * (part + 1) / kWeightParts;
  if (end == first) return;
  const SumRange range = range_of(block, product.outputs, product.inputs, product.input.width);
  const auto term_at = [&](int32_t entry) -> SumTerm {
    const ListedTile tile = listed_tile(p, first + entry);
    const int64_t row = chunk.row_of(tile);
    return {product.gradient.first == nullptr ? p.ones : product.gradient.at(product.gradient_step, row),
            product.input.at(product.input_step, row), product.of_pairs ? tile.n_sets : tile.n_rows};
  };
  float* sums = part == 0 ? p.weight_gradients : p.weight_parts + (part - 1) * p.n_weights;
  add_row_sums(range, end - first, sums + product.weight, term_at);
}

// Adds to the gradients of biases; each warp takes one output.
ITM_FAST_DEVICE_APART void add_to_bias(const RegulationBackward& p, TileChunk chunk, int64_t number, int64_t block) {
  const WeightProduct product = weight_product(p, number);
  const int64_t output = block * RowSumTile::kWarps + warp();
  if (output >= product.outputs) return;
  float sum = 0.0f;
  for (int64_t first = chunk.first_tile; first < chunk.end_tile; first += 32) {
    const int count = static_cast<int>(smaller(chunk.end_tile - first, 32));
    int64_t row = 0;
    int depth = 0;
    if (lane() < count) {
      const ListedTile tile = listed_tile(p, first + lane());
      row = chunk.row_of(tile);
      depth = product.of_pairs ? tile.n_sets : tile.n_rows;
    }
    for (int i = 0; i < count; ++i) {
      const int n = shuffle(depth, i);
      const float* gradients = product.gradient.at(product.gradient_step, shuffle(row, i)) + output * padded(n);
      for (int r = lane(); r < n; r += 32) sum += gradients[r];
    }
  }
  sum = add_lanes(sum);
  if (lane() == 0) p.weight_gradients[product.bias + output] += sum;
}

ITM_FAST_DEVICE_APART void add_to_contexts(const RegulationBackward& p, TileChunk chunk, int64_t context,
                                           int64_t block) {
  const RegulationProblem<float>& f = p.forward;
  const BackwardArrays& a = p.arrays;
  const int64_t n_contexts = f.contexts.length(context), stride = operand_stride(f.dim);
  const SumRange range = range_of(block, n_contexts, f.dim, stride);
  const int64_t before = p.lists.first_tile[context], after = p.lists.first_tile[context + 1];
  const int64_t first = before > chunk.first_tile ? before : chunk.first_tile, end = smaller(after, chunk.end_tile);
  if (range.n_rows <= 0 || end <= first) return;
  // Each tile has two terms for each of its attentions.
  const int64_t per_tile = 2 * p.n_attentions();
  const auto term_at = [&](int32_t entry) -> SumTerm {
    const ListedTile tile = listed_tile(p, first + entry / per_tile);
    const int64_t row = chunk.row_of(tile), attention = entry % per_tile / 2;
    if (entry % 2 == 0) return {a.turned_attention.at(attention, row), a.attended.at(attention, row), tile.n_rows};
    const bool follows = f.options.n_correspondences > 0 && (attention > 0 || f.options.n_alignments == 0);
    const bool reweights = f.options.learned_factors || follows;
    const float* queries = reweights ? a.reweighted.at(attention, row) : a.queries.at(0, row);
    return {a.turned_scores.at(attention, row), queries, tile.n_rows};
  };
  add_row_sums(range, (end - first) * per_tile, p.context_gradients + f.contexts.offset(context) * f.dim, term_at);
}

// Adds the rows of all pairs to the gradient of a query set; a thread takes one column.
ITM_FAST_DEVICE_APART void add_to_queries(const RegulationBackward& p, TileChunk chunk, int64_t query,
                                          int64_t column_block) {
  const RegulationProblem<float>& f = p.forward;
  const int64_t column = column_block * RowSumTile::kThreads + thread_index();
  const int64_t n_rows = f.queries.length(query), first_row = f.queries.offset(query);
  const int64_t n_listed = p.lists.context_counts[query];
  for (int64_t first = 0; first < n_listed; first += 32) {
    int64_t row = -1;  // of the pair of a lane, if it is in the chunk
    if (first + lane() < n_listed) {
      const int64_t context = p.lists.contexts[query * f.contexts.n_sets + first + lane()];
      const int64_t found = p.lists.first_row[context] + p.lists.rows[context * f.queries.n_sets + query];
      if (found >= chunk.first_row && found < chunk.end_row) row = found - chunk.first_row;
    }
    const uint32_t lanes = ballot(row >= 0);
    if (lanes == 0) continue;
    for (int64_t j = 0; j < n_rows; ++j) {
      float sum = 0.0f;
      for (int i = 0; i < 32; ++i) {
        const int64_t from = shuffle(row, i);
        if (from >= 0 && column < f.dim) sum += p.arrays.query_gradient.at(0, from + j)[column];
      }
      if (column < f.dim) p.query_gradients[(first_row + j) * f.dim + column] += sum;
    }
  }
}

// Adds what a chunk contributes to all gradients. The longest tasks come first, so that blocks finish together: weights
// that sum all rows and contexts, then weights that sum one row per pair, biases, queries.
ITM_FAST_DEVICE void add_chunk(const RegulationBackward& p, const TileChunk& chunk) {
  const RegulationProblem<float>& f = p.forward;
  BlockTasks tasks(p.taken);
  const auto share_weights = [&](bool of_pairs) {
    for (int64_t i = 0; i < p.n_products(); ++i) {
      const WeightProduct product = weight_product(p, i);
      if (product.weight < 0 || product.of_pairs != of_pairs) continue;
      const int64_t blocks = row_blocks(product.outputs) * column_blocks(product.inputs);
      tasks.share(blocks * kWeightParts,
                  [&](int64_t task) { add_to_weight(p, chunk, i, task % blocks, static_cast<int>(task / blocks)); });
    }
  };
  const int64_t context = context_of(p.lists.first_tile, f.contexts.n_sets, chunk.first_tile);
  const int64_t last = context_of(p.lists.first_tile, f.contexts.n_sets, chunk.end_tile - 1);
  const int64_t per_context = row_blocks(f.columns) * column_blocks(f.dim);
  const auto share_contexts = [&] {
    tasks.share((last + 1 - context) * per_context,
                [&](int64_t task) { add_to_contexts(p, chunk, context + task / per_context, task % per_context); });
  };
  // The tiles of the average context set, with two terms per attention, beside a part of all tiles.
  const bool contexts_first = 2 * p.n_attentions() * kWeightParts > last + 1 - context;
  if (contexts_first) share_contexts();
  share_weights(false);
  if (!contexts_first) share_contexts();
  share_weights(true);
  for (int64_t i = 0; i < p.n_products(); ++i) {
    const WeightProduct product = weight_product(p, i);
    if (product.bias < 0) continue;
    tasks.share((product.outputs + RowSumTile::kWarps - 1) / RowSumTile::kWarps,
                [&](int64_t block) { add_to_bias(p, chunk, i, block); });
  }
  const int64_t per_query = (f.dim + RowSumTile::kThreads - 1) / RowSumTile::kThreads;
  tasks.share(f.queries.n_sets * per_query,
              [&](int64_t task) { add_to_queries(p, chunk, task / per_query, task % per_query); });
}

// Adds up the parts of the gradients of weights. For all threads of the grid.
ITM_FAST_DEVICE void add_weight_parts(const RegulationBackward& p) {
  for_all_threads(p.n_weights, [&](int64_t i) {
    float sum = p.weight_gradients[i];
    for (int64_t part = 0; part < kWeightParts - 1; ++part) sum += p.weight_parts[part * p.n_weights + i];
    p.weight_gradients[i] = sum;
  });
}

// Rows that are exactly zero have no direction and receive no gradient. For all warps of the grid.
ITM_FAST_DEVICE void clear_zero_rows(const SetRows<float>& rows, int64_t dim, float* gradients) {
  for_all_warps(rows.n_rows, [&](int64_t row) {
    bool any = false;
    for (int64_t d = lane(); d < dim; d += 32) any = any || rows.values[row * dim + d] != 0.0f;
    if (vote_any(any)) return;
    for (int64_t d = lane(); d < dim; d += 32) gradients[row * dim + d] = 0.0f;
  });
}

}  // namespace itm_fast::cuda
