// Backward of regulated cross-attention on a GPU: the parameters of its two launches, and the arrays of its tiles.
//
// A tile holds listed query sets with one context set, at most Tile::kRows rows together, or one longer set. Tiles are
// processed in chunks, so the arrays have a fixed number of rows. The rows of a tile start at a multiple of four:
// matrices that are stored transposed then have rows aligned to 16 bytes.
#pragma once

#include "itm_fast/cuda/pair_lists.h"
#include "itm_fast/cuda/regulation_problem.h"

namespace itm_fast::cuda {

// One array per step, each with `width` numbers per row of the chunk. `turned` arrays hold a matrix (width, padded
// rows) for each tile instead.
struct StepArray {
  float* first;
  int64_t distance;  // between the arrays of two steps
  int64_t width;

  ITM_FAST_DEVICE float* at(int64_t step, int64_t row) const { return first + step * distance + row * width; }
};

// What a chunk keeps. An attention without alignments, at the end, is the one after the last step with alignments.
struct BackwardArrays {
  StepArray queries, query_gradient;          // copies of the query rows
  StepArray attended, reweighted;             // by attention; attended vectors become their gradients
  StepArray raw, attention;                   // by attention; raw scores become their gradients
  StepArray turned_scores, turned_attention;  // until the scores are turned, the first holds them normalised
  StepArray squares, aligned, aligned_norms, turned_aligned;  // by alignment
  StepArray hidden, narrow, changes, channels, temperatures;  // by correspondence, as it leaves them
  StepArray turned_hidden, turned_narrow, turned_changes, shift_gradients;
  StepArray local, logits, turned_local;       // by aggregation; become their gradients
  StepArray guide, v_gradients, turned_guide;  // of pairs
  StepArray guidance;                          // of pairs; before each aggregation, and the last one
  StepArray scored, score_gradient, guidance_gradient, weighted, gathered;  // of pairs
  StepArray channels_gradient, temperature_gradient, aligned_gradient;
  StepArray product, gradient;  // scratch
};

// The pairs with a gradient, by context set and by query set, and the tiles of each context set. Arrays of pairs have
// n_contexts lines of n_queries, except `contexts`.
struct TileLists {
  int32_t* queries;                                 // of each context set
  int32_t* rows;                                    // of a pair: its first row in its context set; -1: no gradient
  int32_t *tile_entries, *tile_rows;                // of each tile: its first entry, and first row in its context set
  int32_t *pair_counts, *tile_counts, *row_counts;  // of each context set
  int64_t *first_tile, *first_row;                  // totals before each context set, and of all
  int32_t *contexts, *context_counts;               // (query sets, context sets), of each query set
  int32_t* refused;                                 // zero; 1 if a set with a gradient exceeds the kernel's limits
};

// The tiles of a chunk are cut into as many parts for the sums of weight gradients, so that there are enough tasks for
// all blocks. The parts are added up at the end, in order.
constexpr int kWeightParts = 4;

struct RegulationBackward {
  RegulationProblem<float> forward;   // without results
  float* turned_layers[kMostLayers];  // (inputs, operand_stride(outputs)): transposed weights
  const float* gradients;             // of the scores (query sets, context sets), or of the alignments
  bool aligns;                        // (context sets, query rows, width)
  float *query_gradients, *context_gradients, *weight_gradients;
  int64_t n_weights;
  int64_t* n_pairs;
  TileLists lists;
  BackwardArrays arrays;
  float* ones;          // forward.rows of them
  float* weight_parts;  // (kWeightParts - 1, n_weights): sums over all but the first part of each chunk
  int64_t chunk_rows;   // a multiple of four, at least those of a tile
  int64_t prepared;     // blocks of the first launch that prepare the forward
  int32_t* arrived;     // zero
  int32_t* taken;       // for BlockTasks

  constexpr int64_t n_attentions() const {
    return forward.options.n_alignments + (forward.options.ends_in_cosines() ? 1 : 0);
  }
  constexpr int64_t n_products() const {
    const RegulatorOptions& o = forward.options;
    return o.n_alignments + 4 * (o.n_correspondences + o.n_aggregations) + (o.scored ? 1 : 0) +
           (o.learned_factors ? 2 : 0);
  }
};

static_assert(sizeof(RegulationBackward) <= 4096);  // the limit of a launch's parameters

// A gradient of weights: a sum over the tiles of turned gradients (outputs, rows) times inputs (rows, inputs), and of
// the gradients for the bias. Positions are those in `weight_gradients`.
struct WeightProduct {
  StepArray gradient, input;  // without a gradient, the coefficients are ones
  int64_t gradient_step, input_step;
  int32_t outputs, inputs;
  bool of_pairs;         // rows are pairs
  int64_t weight, bias;  // -1: none
};

// The products in the order of the weights.
ITM_FAST_DEVICE WeightProduct weight_product(const RegulationBackward& p, int64_t index) {
  const RegulatorOptions& options = p.forward.options;
  const BackwardArrays& a = p.arrays;
  const StepArray none{};
  const int width = static_cast<int>(p.forward.width), dim = static_cast<int>(p.forward.dim);
  WeightProduct found{};
  int64_t count = 0, taken = 0;
  const auto take = [&](bool exists, int64_t size) {
    const int64_t first = taken;
    if (exists) taken += size;
    return exists ? first : -1;
  };
  const auto list = [&](const StepArray& gradient, const StepArray& input, int64_t step, int64_t input_step,
                        int outputs, int inputs, bool of_pairs, bool has_weight, bool has_bias) {
    const int64_t weight = take(has_weight, int64_t{outputs} * inputs), bias = take(has_bias, outputs);
    if (count++ == index) found = {gradient, input, step, input_step, outputs, inputs, of_pairs, weight, bias};
  };
  for (int64_t i = 0; i < options.n_alignments; ++i) {
    list(a.turned_aligned, a.squares, i, i, width, dim, false, true, true);
  }
  const StepArray& seen = options.sees_query ? a.queries : a.aligned;
  for (int64_t i = 0; i < options.n_correspondences; ++i) {
    const LayerOperand<float>&w1 = p.forward.correspondence(i, 0), &w3 = p.forward.correspondence(i, 2);
    const int64_t seen_step = options.sees_query ? 0 : i;
    list(a.turned_hidden, seen, i, seen_step, w1.outputs, w1.inputs, false, true, true);
    list(a.turned_changes, a.hidden, i, i, dim, w1.outputs, false, true, true);
    list(a.turned_narrow, seen, i, seen_step, w3.outputs, w3.inputs, false, true, true);
    list(a.shift_gradients, a.narrow, i, i, 1, w3.outputs, false, true, true);
  }
  for (int64_t i = 0; i < options.n_aggregations; ++i) {
    const int64_t aligned = options.interleaved ? i : options.n_alignments - 1;
    list(a.turned_guide, a.guidance, i, i, width, width, true, true, true);
    list(a.turned_local, a.aligned, i, aligned, width, width, false, true, true);
    list(none, a.v_gradients, 0, i, 1, width, true, true, false);
    list(a.logits, none, i, 0, 1, 0, false, false, true);
  }
  if (options.scored) list(a.score_gradient, a.scored, 0, 0, 1, width, true, true, true);
  if (options.learned_factors) {
    list(none, a.channels_gradient, 0, 0, 1, dim, false, true, false);
    list(a.temperature_gradient, none, 0, 0, 1, 0, false, false, true);
  }
  return found;
}

}  // namespace itm_fast::cuda
