// The pairs of a tile of contexts and a tile of queries, in the order of blocks. A problem has queries, contexts,
// query_tiles and context_tiles.
#pragma once

#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

// Query tiles of adjacent blocks, so that one read of a context tile serves all of them.
inline constexpr int64_t kQueryTilesTogether = 8;

// A pair of tiles, and the sets of both.
struct TilePair {
  int64_t context_tile, query_tile;
  TileSets contexts, queries;

  ITM_FAST_DEVICE bool is_long() const { return contexts.is_long || queries.is_long; }
};

template <typename Problem>
ITM_FAST_DEVICE int64_t tile_pairs(const Problem& p) {
  return *p.context_tiles.n_tiles * *p.query_tiles.n_tiles;
}

template <typename Tile, typename Problem>
ITM_FAST_DEVICE TilePair open_pair(const Problem& p, int64_t pair) {
  const int64_t context_tiles = *p.context_tiles.n_tiles, query_tiles = *p.query_tiles.n_tiles;
  const int64_t group = pair / (context_tiles * kQueryTilesTogether);
  const int64_t first = group * kQueryTilesTogether, left = query_tiles - first;
  const int64_t together = left < kQueryTilesTogether ? left : kQueryTilesTogether;
  const int64_t place = pair - first * context_tiles;
  TilePair opened;
  opened.context_tile = place / together;
  opened.query_tile = first + place % together;
  opened.contexts = open_tile(p.contexts, p.context_tiles, opened.context_tile, Tile::kRows);
  opened.queries = open_tile(p.queries, p.query_tiles, opened.query_tile, Tile::kColumns);
  return opened;
}

}  // namespace itm_fast::cuda
