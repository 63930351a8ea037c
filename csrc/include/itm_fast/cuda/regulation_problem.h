// Regulated cross-attention on a GPU: shared code of the two launches, and the first of them.
//
// prepare_regulation packs the query sets into tiles, and converts all operands of products: queries, contexts,
// transposed contexts, and weights, in the multiplication type and with rows aligned to 16 bytes. Rows of operands are
// padded with zeros to whole asynchronous copies. It also computes the Gram matrices of the contexts, as they are
// multiplied. The second launch is in regulation.h.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/set_gram.h"
#include "itm_fast/cuda/set_tiles.h"
#include "itm_fast/cuda/tile_product.h"
#include "itm_fast/regulators.h"

namespace itm_fast::cuda {

// Maximum number each of alignments, correspondences and aggregations in a call: they are part of a launch's
// parameters.
inline constexpr int kMostSteps = 8;
inline constexpr int kMostLayers = 6 * kMostSteps;

// Elements between rows of an operand: a multiple of 16 bytes in every type.
constexpr int64_t operand_stride(int64_t columns) { return (columns + 7) / 8 * 8; }

// A linear layer. `packed` is its weight as an operand.
template <typename S>
struct LayerOperand {
  const float *weight, *bias;  // (outputs, inputs) and (outputs,)
  S* packed;
  int32_t outputs, inputs;

  ITM_FAST_DEVICE int64_t stride() const { return operand_stride(inputs); }
};

// A layer with one output.
struct VectorLayer {
  const float *weight, *bias;
};

// Global memory of a block of the second launch: pointers of block 0; those of the other blocks follow `bytes` apart. A
// row is one query row with one context set. The size depends on the lengths of sets, not on their number or width.
template <typename S>
struct RegulationSlab {
  int64_t bytes;
  S* attention;        // (rows, contexts)
  S* chunk;            // (rows of a product, columns of a chunk): squared differences, or reweighted queries
  float* logits;       // (rows, contexts): raw scores of the chunks so far; those of long sets
  float* channels;     // (rows of a product, columns of a product): e of the correspondences so far
  float* aligned;      // (rows, width_stride)
  S* aligned_operand;  // the same
  S* hidden;           // (correspondences, rows, hidden_stride): tanh(W1 a + b1) of each
  float* guidance;     // (sets, width_stride)
  S* guidance_operand;
  float* guide;  // (sets, width_stride): v * drop(tanh(A g + alpha))
};

template <typename S>
struct RegulationProblem {
  SetRows<float> queries, contexts;
  int64_t dim, width, hidden;  // of rows, of alignments, of the widest W1
  int32_t rows, columns;       // the most query rows of a tile, and contexts of a set
  RegulatorOptions options;
  PairOptions attention;
  bool is_aligned;      // rows of contexts are aligned to 16 bytes
  const int64_t* seed;  // of the dropout; null: no dropout
  LayerOperand<S> layers[kMostLayers];
  VectorLayer shifts[kMostSteps];         // w4, b4
  VectorLayer attentiveness[kMostSteps];  // v, c
  VectorLayer score;                      // u, u0
  const float *channels, *temperature;    // if factors are learned
  // Written by the first launch:
  TilePlan query_tiles;
  S *query_operand, *context_operand;  // (rows, operand_stride(dim))
  S* transposed;                       // of each context set: (dim, operand_stride(length)), see transposed_start
  float* grams;  // of each context set of at most gram_width rows: at its first row of (contexts.n_rows, gram_width)
  int32_t gram_width;  // see GramOperand for sets that take several products
  RegulationSlab<S> slab;
  float* scores;      // (queries.n_sets, contexts.n_sets), or null and
  float* alignments;  // (contexts.n_sets, queries.n_rows, width)

  // The layers in order: the alignments', then w1, w2 and w3 of each correspondence, then a and b of each aggregation.
  ITM_FAST_DEVICE const LayerOperand<S>& alignment(int step) const { return layers[step]; }
  ITM_FAST_DEVICE const LayerOperand<S>& correspondence(int step, int which) const {
    return layers[options.n_alignments + 3 * step + which];
  }
  ITM_FAST_DEVICE const LayerOperand<S>& aggregation(int step, int which) const {
    return layers[options.n_alignments + 3 * options.n_correspondences + 2 * step + which];
  }
  constexpr int64_t n_layers() const {
    return options.n_alignments + 3 * options.n_correspondences + 2 * options.n_aggregations;
  }

  // First column of a set's transposed rows, in a matrix with `transposed_columns` columns. Columns are rounded up to
  // multiples of eight, so every set has enough.
  constexpr int64_t transposed_columns() const { return operand_stride(contexts.n_rows + 7 * contexts.n_sets); }
  ITM_FAST_DEVICE int64_t transposed_start(int64_t set) const { return (contexts.offset(set) + 7 * set) / 8 * 8; }
};

// Stores numbers as an operand, padded with zeros.
template <typename S>
ITM_FAST_DEVICE void pack_row(const float* source, int64_t columns, S* target) {
  for (int64_t c = lane(); c < operand_stride(columns); c += 32) narrow(c < columns ? source[c] : 0.0f, target[c]);
}

template <typename S>
ITM_FAST_DEVICE void transpose_set(const RegulationProblem<S>& p, int64_t set) {
  const int64_t length = p.contexts.length(set);
  if (length > p.columns) return;  // The result is never read.
  const int64_t stride = operand_stride(length);
  const float* rows = p.contexts.values + p.contexts.offset(set) * p.dim;
  S* target = p.transposed + p.transposed_start(set) * p.dim;
  for (int64_t i = thread_index(); i < stride * p.dim; i += block_threads()) {
    const int64_t d = i % p.dim, k = i / p.dim;
    narrow(k < length ? rows[k * p.dim + d] : 0.0f, target[d * stride + k]);
  }
}

// The Gram matrix of a context set as the operand of products, symmetric, in place of that in float32: rows of float32,
// or rows of bfloat16, a row of high parts followed by one of low parts.
template <typename S>
struct GramOperand {
  static constexpr int kParts = std::is_same_v<S, float> ? 1 : 2;
  S* first;
  int stride;  // columns, padded with zeros

  ITM_FAST_DEVICE GramOperand(float* gram, int n) : first(reinterpret_cast<S*>(gram)), stride(gram_stride(n)) {}
  ITM_FAST_DEVICE int row_stride() const { return kParts * stride; }
  ITM_FAST_DEVICE S* rows(int row, int part) const { return first + row * row_stride() + part * stride; }
  ITM_FAST_DEVICE void store(int row, int column, float product) const {
    for (int part = 0; part < kParts; ++part) {
      S& stored = rows(row, part)[column];
      narrow(product, stored);
      product -= widen(stored);
    }
  }
  ITM_FAST_DEVICE float square(int row) const { return widen(rows(row, 0)[row]); }  // of a context, without low part
};

inline constexpr int64_t kPackedRows = 64;  // per block

// Blocks: one for the plan, one per context set, then one per kPackedRows rows of all other operands together.
template <typename Tile, typename S>
ITM_FAST_DEVICE void prepare_operands(const RegulationProblem<S>& p, int64_t block) {
  if (block == 0) {
    plan_tiles<Tile::kWindow>(p.queries, Tile::kRows, p.query_tiles);
    return;
  }
  if (--block < p.contexts.n_sets) {
    transpose_set(p, block);
    return;
  }
  const int64_t first = (block - p.contexts.n_sets) * kPackedRows;
  const int64_t stride = operand_stride(p.dim);
  for (int64_t i = first + warp(); i < first + kPackedRows; i += Tile::kWarps) {
    int64_t row = i;
    if (row < p.queries.n_rows) {
      pack_row(p.queries.values + row * p.dim, p.dim, p.query_operand + row * stride);
      continue;
    }
    row -= p.queries.n_rows;
    if (row < p.contexts.n_rows) {
      pack_row(p.contexts.values + row * p.dim, p.dim, p.context_operand + row * stride);
      continue;
    }
    row -= p.contexts.n_rows;
    int layer = 0;
    const int n_layers = static_cast<int>(p.n_layers());
    while (layer < n_layers && row >= p.layers[layer].outputs) row -= p.layers[layer++].outputs;
    if (layer == n_layers) return;
    const LayerOperand<S>& found = p.layers[layer];
    pack_row(found.weight + row * found.inputs, found.inputs, found.packed + row * found.stride());
  }
}

// Grid: a block for the Gram matrix of each context set, then those of prepare_operands.
template <typename Tile, typename S>
ITM_FAST_DEVICE void prepare_regulation(const RegulationProblem<S>& p) {
  static_assert(Tile::kThreads == SetTile::kThreads);
  const int64_t set = block_index();
  if (set >= p.contexts.n_sets) {
    prepare_operands<Tile>(p, set - p.contexts.n_sets);
    return;
  }
  const int64_t length = p.contexts.length(set), first = p.contexts.offset(set);
  if (length > p.gram_width) return;
  // Of the operands: float32 rows are rounded to bfloat16 on their way.
  constexpr int kGramParts = std::is_same_v<S, float> ? 3 : 1;
  const float* rows = p.contexts.values + first * p.dim;
  float* gram = p.grams + first * p.gram_width;
  const int n = static_cast<int>(length);
  if (n <= Tile::kColumns) {
    write_gram_of_set<kGramParts>(rows, n, p.dim, p.is_aligned, gram);
    return;
  }
  const GramOperand<S> operand(gram, n);
  each_gram_product<kGramParts>(rows, n, p.dim, p.is_aligned,
                                [&](int row, int column, float product) { operand.store(row, column, product); });
}

}  // namespace itm_fast::cuda
