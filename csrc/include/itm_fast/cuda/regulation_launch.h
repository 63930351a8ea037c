// Launch of the kernels of regulated cross-attention: grids, workspace and layers. Host code, shared by the launcher
// and the tests.
#pragma once

#include <algorithm>
#include <type_traits>

#include "itm_fast/cuda/cross_attention_launch.h"
#include "itm_fast/cuda/regulation.h"

namespace itm_fast::cuda {

// Products of at most 112 query rows (three images of 36 regions, or the words of about eight captions) with 128
// contexts. Longer sets take several.
struct RegulationTile112 : ScoreTile112 {
  static constexpr int kChunk = 512;
  static constexpr int kFewTiles = 2;  // A context set has about 36 rows, a layer 128 outputs at a time.
};
// The same with 16 warps. The forward is a chain of small products that wait for memory most of the time, which more
// warps hide. Products of one part leave room for two blocks of eight warps instead, which do not wait for each other.
struct WideRegulationTile112 : ProductTile<112, 128, 4, 4, 4, 256> {
  static constexpr int kChunk = RegulationTile112::kChunk, kFewTiles = RegulationTile112::kFewTiles;
};
template <int kParts>
using RegulationTileOf = std::conditional_t<kParts == 1, RegulationTile112, WideRegulationTile112>;

template <typename Tile>
constexpr int64_t kRegulationBytes = RegulationMemory<Tile>::kBytes;

// The sizes that determine a call's workspace.
struct RegulationSizes {
  int64_t width, hidden;
  LongestSets longest;
  int64_t blocks;  // of the second launch, at most
};

// Lays out the operands of products. The layers are already set, except `packed`. The backward uses no Gram matrices.
template <typename Tile, typename S>
void place_operands(RegulationProblem<S>& p, const RegulationSizes& sizes, Workspace& workspace) {
  const int64_t stride = operand_stride(p.dim);
  p.rows = static_cast<int32_t>(slab_rows(p.queries, sizes.longest.queries, Tile::kRows, kMostQueries));
  p.columns = static_cast<int32_t>(slab_rows(p.contexts, sizes.longest.contexts, Tile::kColumns, kMostContexts));
  place_plan(p.query_tiles, most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kRows), workspace);
  p.query_operand = workspace.take<S>(p.queries.n_rows * stride);
  p.context_operand = workspace.take<S>(p.contexts.n_rows * stride);
  p.transposed = workspace.take<S>(p.transposed_columns() * p.dim);
  for (int64_t i = 0; i < p.n_layers(); ++i) {
    p.layers[i].packed = workspace.take<S>(p.layers[i].outputs * operand_stride(p.layers[i].inputs));
  }
  p.width = sizes.width;
  p.hidden = sizes.hidden;
}

// The longest context sets that get a Gram matrix. For sets of several products, every alignment of every query row
// multiplies the attention with it, in as many parts as a GramOperand has, in place of `dim` columns of attended
// vectors. This must save more than half of the matrix costs. Two parts of float32 would lose too many digits where
// contexts cancel.
template <int kParts, typename Tile, typename S>
int32_t gram_width(const RegulationProblem<S>& p) {
  if (!p.options.normalize_attended || p.options.n_alignments == 0) return 0;
  const int64_t saved = p.queries.n_rows * p.options.n_alignments * (p.dim - GramOperand<S>::kParts * p.columns);
  return kParts != 2 && 2 * saved > p.columns * p.dim ? p.columns : Tile::kColumns;
}

// Lays out p's workspace, apart from inputs, options and results. It need not be zero. Returns the number of blocks of
// the second launch, each with a slab.
template <int kParts, typename Tile, typename S>
int64_t place_regulation(RegulationProblem<S>& p, const RegulationSizes& sizes, Workspace& workspace) {
  place_operands<Tile>(p, sizes, workspace);
  p.gram_width = gram_width<kParts, Tile>(p);
  p.grams = workspace.take<float>(p.contexts.n_rows * p.gram_width);
  const int64_t rows = p.rows, width = operand_stride(sizes.width);
  const int64_t before = workspace.bytes();
  const bool reweights = p.options.n_correspondences > 0;
  RegulationSlab<S>& slab = p.slab;
  slab.attention = workspace.take<S>(rows * p.columns);
  slab.chunk = workspace.take<S>(Tile::kRows * Tile::kChunk);
  slab.logits = workspace.take<float>(rows * p.columns);
  slab.channels = workspace.take<float>(reweights ? Tile::kRows * Tile::kColumns : 0);
  slab.aligned = workspace.take<float>(rows * width);
  slab.aligned_operand = workspace.take<S>(rows * width);
  slab.hidden = workspace.take<S>(p.options.n_correspondences * rows * operand_stride(sizes.hidden));
  slab.guidance = workspace.take<float>(kTileSets * width);
  slab.guidance_operand = workspace.take<S>(kTileSets * width);
  slab.guide = workspace.take<float>(kTileSets * width);
  slab.bytes = workspace.bytes() - before;
  const int64_t blocks = std::clamp<int64_t>(kRoomForSlabs / slab.bytes, 1, std::max<int64_t>(sizes.blocks, 1));
  workspace.take<unsigned char>(slab.bytes * (blocks - 1));
  return blocks;
}

template <typename S>
int64_t operand_blocks(const RegulationProblem<S>& p) {
  int64_t rows = p.queries.n_rows + p.contexts.n_rows;
  for (int64_t i = 0; i < p.n_layers(); ++i) rows += p.layers[i].outputs;
  return 1 + p.contexts.n_sets + (rows + kPackedRows - 1) / kPackedRows;
}

template <typename S>
int64_t preparing_blocks(const RegulationProblem<S>& p) {
  return p.contexts.n_sets + operand_blocks(p);
}

// As many blocks as there are pairs of a tile and a context set, at most `at_most`.
template <typename Tile, typename S>
int64_t regulating_blocks(const RegulationProblem<S>& p, int64_t at_most) {
  const int64_t tiles = most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kRows);
  return tiles * p.contexts.n_sets < at_most ? tiles * p.contexts.n_sets : at_most;
}

}  // namespace itm_fast::cuda
