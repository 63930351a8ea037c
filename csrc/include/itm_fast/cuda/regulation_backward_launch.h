// Launch of the backward of regulated cross-attention: grids and workspace. Host code, shared by the launcher and the
// tests.
#pragma once

#include <algorithm>

#include "itm_fast/cuda/regulation_backward.h"
#include "itm_fast/cuda/regulation_launch.h"

namespace itm_fast::cuda {

// Numbers that the arrays of a chunk have room for, 4 bytes each. RCAR with two steps, 1024 channels and alignments of
// 256 numbers keeps about 23,000 per row: the hardest negatives of 128 captions of 13 words fit.
inline constexpr int64_t kRoomForRows = 130'000'000;

template <typename Tile>
constexpr int64_t kRegulationBackwardBytes = BackwardMemory<Tile>::kBytes;

// Lays out the arrays of a chunk with `rows` rows, a multiple of four.
inline void place_arrays(RegulationBackward& p, int64_t hidden_width, int64_t rows, Workspace& workspace) {
  const RegulatorOptions& o = p.forward.options;
  const int64_t dim = operand_stride(p.forward.dim), width = operand_stride(p.forward.width);
  const int64_t hidden = operand_stride(hidden_width), attentions = p.n_attentions();
  const int64_t reweights = o.n_correspondences > 0 || o.learned_factors ? 1 : 0, one = 1;
  const auto take = [&](StepArray& array, int64_t steps, int64_t numbers) {
    array = {workspace.take<float>(steps * rows * numbers), rows * numbers, numbers};
  };
  BackwardArrays& a = p.arrays;
  for (StepArray* array : {&a.queries, &a.query_gradient}) take(*array, 1, dim);
  take(a.attended, attentions, dim);
  take(a.reweighted, attentions * reweights, dim);
  for (StepArray* array : {&a.raw, &a.attention, &a.turned_scores, &a.turned_attention}) {
    take(*array, attentions, p.forward.columns);
  }
  take(a.squares, o.n_alignments, dim);
  take(a.aligned, o.n_alignments, width);
  take(a.aligned_norms, o.n_alignments, one);
  take(a.turned_aligned, o.n_alignments, width);
  for (StepArray* array : {&a.hidden, &a.narrow, &a.turned_hidden, &a.turned_narrow}) {
    take(*array, o.n_correspondences, hidden);
  }
  for (StepArray* array : {&a.changes, &a.channels, &a.turned_changes}) take(*array, o.n_correspondences, dim);
  for (StepArray* array : {&a.temperatures, &a.shift_gradients}) take(*array, o.n_correspondences, one);
  for (StepArray* array : {&a.local, &a.turned_local, &a.guide, &a.turned_guide, &a.v_gradients}) {
    take(*array, o.n_aggregations, width);
  }
  take(a.logits, o.n_aggregations, one);
  take(a.guidance, o.n_aggregations + 1, width);
  for (StepArray* array : {&a.scored, &a.guidance_gradient, &a.weighted, &a.gathered, &a.aligned_gradient}) {
    take(*array, 1, width);
  }
  for (StepArray* array : {&a.score_gradient, &a.temperature_gradient}) take(*array, 1, one);
  take(a.channels_gradient, reweights, dim);
  take(a.gradient, 1, std::max(width, hidden));
  take(a.product, 1, std::max<int64_t>(dim, p.forward.columns));
}

// Lays out p's workspace; p has operands, options, layers, and results with their sizes. Returns the leading bytes that
// must be zero. `hidden`: outputs of the widest hidden layer; `room`: numbers of the arrays, at least those of one
// tile.
template <typename Tile>
int64_t place_backward(RegulationBackward& p, const RegulationSizes& sizes, Workspace& workspace,
                       int64_t room = kRoomForRows) {
  RegulationProblem<float>& f = p.forward;
  p.lists.refused = workspace.take<int32_t>(1);
  p.arrived = workspace.take<int32_t>(1);
  const int64_t zeros = workspace.bytes();
  place_operands<Tile>(f, sizes, workspace);
  for (int64_t i = 0; i < f.n_layers(); ++i) {
    p.turned_layers[i] = workspace.take<float>(f.layers[i].inputs * operand_stride(f.layers[i].outputs));
  }
  p.prepared = operand_blocks(f);
  p.ones = workspace.take<float>(f.rows);
  p.weight_parts = workspace.take<float>((kWeightParts - 1) * p.n_weights);
  p.taken = workspace.take<int32_t>(1);
  const int64_t n_queries = f.queries.n_sets, n_contexts = f.contexts.n_sets, pairs = n_queries * n_contexts;
  TileLists& lists = p.lists;
  for (int32_t** array : {&lists.queries, &lists.rows, &lists.tile_entries, &lists.tile_rows, &lists.contexts}) {
    *array = workspace.take<int32_t>(pairs);
  }
  for (int32_t** array : {&lists.pair_counts, &lists.tile_counts, &lists.row_counts}) {
    *array = workspace.take<int32_t>(n_contexts);
  }
  lists.context_counts = workspace.take<int32_t>(n_queries);
  for (int64_t** array : {&lists.first_tile, &lists.first_row}) *array = workspace.take<int64_t>(n_contexts + 1);

  Workspace measured;
  place_arrays(p, sizes.hidden, 4, measured);
  const int64_t per_row = measured.bytes() / 16, all = n_contexts * (f.queries.n_rows + 3 * n_queries);
  p.chunk_rows = std::max<int64_t>(std::min(room / per_row, all) / 4 * 4, padded(f.rows));
  place_arrays(p, sizes.hidden, p.chunk_rows, workspace);
  return zeros;
}

inline int64_t preparing_blocks(const RegulationBackward& p) {
  int64_t rows = 0;
  for (int64_t i = 0; i < p.forward.n_layers(); ++i) rows += p.forward.layers[i].inputs;
  return p.prepared + (rows + kPackedRows - 1) / kPackedRows;
}

}  // namespace itm_fast::cuda
