// Backward of regulated_scores and cross_attention_alignments on a GPU: two launches.
//
// prepare_backward prepares the operands of products, transposed weights among them. differentiate_regulation lists the
// pairs with a gradient and cuts them into tiles of query sets with one context set. Then it takes as many tiles at a
// time as the arrays have room for, and computes, with a barrier of the grid after each step:
//
// 1. for each tile, the forward again, which keeps every step, then the steps in reverse (a block per tile);
// 2. what the tiles add to the gradients of weights, contexts and queries (a block per part of a gradient; for weights,
//    a block for a quarter of the tiles as well). The quarters are added up in order at the end.
//
// All products are on tensor cores, in float32. Each sum is in the order of the tiles, so results do not depend on the
// order of blocks or threads, nor on their number.
#pragma once

#include "itm_fast/cuda/regulation_backward_steps.h"
#include "itm_fast/cuda/regulation_backward_sums.h"
#include "itm_fast/cuda/regulation_recompute.h"

namespace itm_fast::cuda {

// Grid: the blocks that prepare the forward, then one per kPackedRows rows of all transposed weights together.
template <typename Tile>
ITM_FAST_DEVICE void prepare_backward(const RegulationBackward& p) {
  const RegulationProblem<float>& f = p.forward;
  if (block_index() < p.prepared) {
    prepare_operands<Tile>(f, block_index());
    return;
  }
  const int64_t first = (block_index() - p.prepared) * kPackedRows;
  for (int64_t i = first + warp(); i < first + kPackedRows; i += Tile::kWarps) {
    int64_t row = i;
    int layer = 0;
    const int n_layers = static_cast<int>(f.n_layers());
    while (layer < n_layers && row >= f.layers[layer].inputs) row -= f.layers[layer++].inputs;
    if (layer == n_layers) return;
    const LayerOperand<float>& found = f.layers[layer];
    const int64_t stride = operand_stride(found.outputs);
    float* target = p.turned_layers[layer] + row * stride;
    for (int64_t c = lane(); c < stride; c += 32) {
      target[c] = c < found.outputs ? found.weight[c * found.inputs + row] : 0.0f;
    }
  }
}

// The forward of the open tile again, then its steps in reverse.
template <typename Tile>
ITM_FAST_DEVICE void differentiate_tile(const RegulationBackward& p) {
  const RegulatorOptions& options = p.forward.options;
  const int n_alignments = static_cast<int>(options.n_alignments);
  const int n_correspondences = static_cast<int>(options.n_correspondences);
  const int n_aggregations = static_cast<int>(options.n_aggregations);
  const int n_steps = n_alignments > n_correspondences ? n_alignments : n_correspondences;
  const int64_t last = n_alignments - 1;
  start_again<Tile>(p);
  for (int step = 0; step < n_steps; ++step) {
    if (step < n_alignments) {
      attend_again<Tile>(p, step);
      align_again<Tile>(p, step);
    }
    if (step < n_correspondences) correspond_again<Tile>(p, step);
    if (!options.interleaved) continue;
    if (step == 0) take_means_again<Tile>(p, int64_t{0});
    aggregate_again<Tile>(p, step, static_cast<int64_t>(step));
  }
  if (p.aligns) {
    take_gradients_backward<Tile>(p);
  } else if (!options.scored) {
    attend_again<Tile>(p, n_steps);
    mean_cosines_backward<Tile>(p);
    attend_backward<Tile>(p, n_steps);
  } else {
    if (!options.interleaved) take_means_again<Tile>(p, last);
    for (int step = 0; step < n_aggregations && !options.interleaved; ++step) aggregate_again<Tile>(p, step, last);
    score_backward<Tile>(p);
    for (int step = n_aggregations - 1; step >= 0 && !options.interleaved; --step) {
      aggregate_backward<Tile>(p, step, last);
    }
    if (!options.interleaved) take_means_backward<Tile>(p);
  }
  for (int step = n_steps - 1; step >= 0; --step) {
    if (options.interleaved) {
      aggregate_backward<Tile>(p, step, static_cast<int64_t>(step));
      if (step == 0) take_means_backward<Tile>(p);
    }
    if (step < n_correspondences) correspond_backward<Tile>(p, step);
    if (step < n_alignments) {
      align_backward<Tile>(p, step);
      attend_backward<Tile>(p, step);
    }
  }
}

// Grid: blocks that are resident together.
template <typename Tile>
ITM_FAST_DEVICE void differentiate_regulation(const RegulationBackward& p) {
  static_assert(Tile::kThreads == RowSumTile::kThreads);
  const RegulationProblem<float>& f = p.forward;
  int32_t round = 0;
  const int64_t query_numbers = f.queries.n_rows * f.dim, context_numbers = f.contexts.n_rows * f.dim;
  const auto fill = [&](float value) {
    for_all_threads(query_numbers, [&](int64_t i) { p.query_gradients[i] = value; });
    for_all_threads(context_numbers, [&](int64_t i) { p.context_gradients[i] = value; });
    for_all_threads(p.n_weights, [&](int64_t i) { p.weight_gradients[i] = value; });
  };
  fill(0.0f);
  for_all_threads((kWeightParts - 1) * p.n_weights, [&](int64_t i) { p.weight_parts[i] = 0.0f; });
  for_all_threads(f.rows, [&](int64_t i) { p.ones[i] = 1.0f; });
  mark_pairs(p);
  grid_barrier(p.arrived, ++round);
  if (*p.lists.refused != 0) {  // Callers check the limits beforehand.
    fill(HUGE_VALF - HUGE_VALF);
    return;
  }
  for_all_warps(f.contexts.n_sets, [&](int64_t context) { list_tiles<Tile>(p, context); });
  grid_barrier(p.arrived, ++round);
  for_all_warps(f.queries.n_sets, [&](int64_t query) { list_contexts_of(p, query); });
  if (block_index() == 0 && warp() == 0) add_up_tiles(p);
  grid_barrier(p.arrived, ++round);
  const int64_t n_tiles = p.lists.first_tile[f.contexts.n_sets];
  for (int64_t first = 0; first < n_tiles;) {
    const TileChunk chunk = chunk_from(p, first);
    BlockTasks::restart(p.taken);
    for (int64_t number = chunk.first_tile + block_index(); number < chunk.end_tile; number += grid_blocks()) {
      const ListedTile tile = listed_tile(p, number);
      BackwardStep<Tile>::open(p, tile, chunk.row_of(tile));
      differentiate_tile<Tile>(p);
    }
    grid_barrier(p.arrived, ++round);
    add_chunk(p, chunk);
    grid_barrier(p.arrived, ++round);
    first = chunk.end_tile;
  }
  add_weight_parts(p);
  clear_zero_rows(f.queries, f.dim, p.query_gradients);
  clear_zero_rows(f.contexts, f.dim, p.context_gradients);
}

}  // namespace itm_fast::cuda
