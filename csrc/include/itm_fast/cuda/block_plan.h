// The backward of cross_attention_scores if most pairs have a gradient: blocks of scores, which take many sets.
//
// Whole sets are packed into tiles, as in the forward. A chunk is a run of context tiles by a run of query tiles. The
// gradients of its raw scores are two matrices of bfloat16 parts, W and W', whose rows and columns are the rows of all
// of its sets. So the gradients of the sets' rows are two products of large matrices:
//
//   dQ += W X     dX += W' Q     and, per context set, M += p' diag(square) p, whose product with X is added at the end
//
// W and M are those of turn_pair and sum_squares. Chunks of one run of context tiles follow each other. They are nearly
// square, so that both products have work for all blocks.
#pragma once

#include "itm_fast/cuda/backward_chunk.h"

namespace itm_fast::cuda {

// Two images of 36 regions, about four captions. Scores, attention and their products with the Gram matrix fit shared
// memory.
using BlockTile = ProductTile<80, 64, 2, 4, 4, 256>;

// Rows and columns of a task of the two products.
template <typename S>
using BlockSums = PartTile<S, 128>;

// The shared memory of a block that differentiates the scores of a tile. Items are pairs of a context set and a query.
struct BlockMemory {
  static constexpr int kStride = BlockTile::kScoreStride, kMatrix = BlockTile::kRows * kStride, kItems = 1024;
  static constexpr int kAttention = kMatrix * 4, kMixed = 2 * kMatrix * 4, kFactors = 3 * kMatrix * 4;
  static constexpr int kFactorCount = kTileSets * BlockTile::kRows;
  static constexpr int kDots = kFactors + kFactorCount * 4, kSquares = kDots + kItems * 4;
  static constexpr int kCosines = kSquares + kItems * 4, kNorms = kCosines + kItems * 4;
  static constexpr int kStartCount = kTileSets + 4, kContextStarts = kNorms + kItems * 4;
  static constexpr int kQueryStarts = kContextStarts + kStartCount * 4;
  static constexpr int kRowSets = kQueryStarts + kStartCount * 4;
  static constexpr int kColumnSets = kRowSets + BlockTile::kRows * 4;
  static constexpr int kBytes = kColumnSets + BlockTile::kColumns * 4;
  static_assert(BlockTile::kProductBytes <= kFactors);
};

// How many tiles of each side a chunk has, for a room of `room` numbers; 0 and 0 if none fits. The same on all blocks.
struct BlockChunks {
  int64_t context_tiles, query_tiles;  // of a chunk
  int64_t across, down;                // chunks: runs of context tiles, and of query tiles

  template <typename S>
  ITM_FAST_DEVICE explicit BlockChunks(const CrossAttentionBackward<S>& p) {
    constexpr int64_t kParts = RowParts<S>::kOfCoefficients, kRows = BlockTile::kRows, kColumns = BlockTile::kColumns;
    const int64_t of_contexts = *p.context_tiles.n_tiles, of_queries = *p.query_tiles.n_tiles;
    const int64_t width = gram_stride(static_cast<int>(p.gram_contexts()));
    // A tile by a tile has two matrices of 16-bit parts, and a matrix of squares; a context tile has one more of these,
    // and room for a factor of each query.
    const int64_t of_pair = kParts * (kRows + 8) * (kColumns + 8) + kRows * width + kColumns,
                  of_context = kRows * width;
    int64_t side = 1;
    while (4 * (side + 1) * (5 * (side + 1) * of_pair + of_context) <= p.room) ++side;
    context_tiles = 4 * side * (5 * side * of_pair + of_context) <= p.room ? 4 * side : 1;
    across = down = 0;
    query_tiles = smaller((p.room / context_tiles - of_context) / of_pair, of_queries);
    if (query_tiles <= 0 || of_contexts == 0) return;
    down = tiles_of(of_queries, query_tiles);  // Chunks of equal size leave more room for the other side.
    query_tiles = tiles_of(of_queries, down);
    context_tiles = smaller(p.room / (query_tiles * of_pair + of_context), of_contexts);
    across = tiles_of(of_contexts, context_tiles);
    context_tiles = tiles_of(of_contexts, across);
  }
};

// A run of tiles of one side: its sets and rows.
struct TileRun {
  int64_t first_tile, end_tile, first_set, end_set, first_row;
  int n_rows;

  template <typename S>
  ITM_FAST_DEVICE TileRun(const SetRows<S>& sets, const TilePlan& plan, int64_t run, int64_t tiles)
      : first_tile(run * tiles), end_tile(smaller(first_tile + tiles, *plan.n_tiles)) {
    first_set = plan.first_set[first_tile];
    end_set = plan.first_set[end_tile];
    first_row = sets.offset(first_set);
    n_rows = static_cast<int>(sets.offset(end_set) - first_row);
  }
  ITM_FAST_DEVICE int64_t n_tiles() const { return end_tile - first_tile; }
};

// A chunk, and the places of its numbers in p.numbers.
template <typename S>
struct BlockChunk {
  static constexpr int kParts = RowParts<S>::kOfCoefficients;
  TileRun contexts, queries;
  bool is_first_of_contexts, is_last_of_contexts;  // of the chunks with these queries, or with these contexts
  bool is_first_of_queries;
  int width;                   // of the rows of M
  float* squares;              // (1 + query tiles, rows of contexts, width): M so far, and its terms
  float* norms;                // (context tiles, rows of queries): the terms of the factors of queries
  PartMatrix<kParts> weights;  // W': (rows of queries, rows of contexts)
  PartMatrix<kParts> turned;   // W: (rows of contexts, rows of queries)

  ITM_FAST_DEVICE BlockChunk(const CrossAttentionBackward<S>& p, const BlockChunks& chunks, int64_t across,
                             int64_t down)
      : contexts(p.lists.contexts, p.context_tiles, across, chunks.context_tiles),
        queries(p.lists.queries, p.query_tiles, down, chunks.query_tiles),
        is_first_of_contexts(down == 0),
        is_last_of_contexts(down + 1 == chunks.down),
        is_first_of_queries(across == 0),
        width(gram_stride(static_cast<int>(p.gram_contexts()))) {
    squares = p.numbers;
    norms = squares + (1 + queries.n_tiles()) * contexts.n_rows * width;
    uint16_t* parts = reinterpret_cast<uint16_t*>(norms + contexts.n_tiles() * padded_parts(queries.n_rows));
    weights = {parts, static_cast<int>(padded_parts(contexts.n_rows))};
    turned = {parts + int64_t{queries.n_rows} * kParts * weights.stride,
              static_cast<int>(padded_parts(queries.n_rows))};
  }
  // M of the first rows up to the chunk's, or its term of a query tile.
  ITM_FAST_DEVICE float* squares_of(int64_t slot) const { return squares + slot * contexts.n_rows * width; }
};

// The Gram matrix of a context set in float32, in place of that in parts.
template <typename S>
ITM_FAST_DEVICE float* float_gram(const CrossAttentionBackward<S>& p, int64_t set) {
  return reinterpret_cast<float*>(p.gram_of(set).first);
}

// Step 1 of backpropagate_blocks: tiles, Gram matrices and the norms of the queries. Refuses sets that are longer than
// a tile, and offsets that do not ascend. Sets that overlap may have no room for a Gram matrix.
template <typename S>
ITM_FAST_DEVICE void prepare_blocks(const CrossAttentionBackward<S>& p) {
  const SetRows<S>&queries = p.lists.queries, &contexts = p.lists.contexts;
  if (block_index() == 0) plan_tiles<BlockTile::kWindow>(contexts, BlockTile::kRows, p.context_tiles);
  if (block_index() + 1 == grid_blocks()) plan_tiles<BlockTile::kWindow>(queries, BlockTile::kColumns, p.query_tiles);
  const auto check = [&](const SetRows<S>& sets, int64_t most) {
    for (int64_t set = block_index() * kGradientThreads + thread_index(); set < sets.n_sets;
         set += grid_blocks() * kGradientThreads) {
      if (sets.offset(set + 1) < sets.offset(set) || sets.length(set) > most) *p.unsuitable = 1;
    }
  };
  check(queries, BlockTile::kColumns);
  check(contexts, BlockTile::kRows);
  for (int64_t set = block_index(); set < contexts.n_sets; set += grid_blocks()) {
    const int64_t length = contexts.length(set);
    if (length == 0 || length > BlockTile::kRows || p.lists.gram_starts[set] < 0) continue;
    const S* rows = contexts.values + contexts.offset(set) * p.dim;
    const int n = static_cast<int>(length), stride = gram_stride(n), padding = stride - n;
    float* gram = float_gram(p, set);
    each_product(rows, n, rows, n, p.dim, p.is_aligned,
                 [&](int k, int l, float product) { gram[k * stride + l] = product; });
    for (int i = thread_index(); i < n * padding; i += kGradientThreads) {
      gram[i / padding * stride + n + i % padding] = 0.0f;
    }
  }
  for (int64_t row = block_index() * kGradientWarps + warp(); row < queries.n_rows;
       row += grid_blocks() * kGradientWarps) {
    const float norm = norm_of_row(queries.values + row * p.dim, p.dim);
    if (lane() == 0) p.query_norms[row] = norm;
  }
}

}  // namespace itm_fast::cuda
