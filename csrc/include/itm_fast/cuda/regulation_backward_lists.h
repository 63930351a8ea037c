// Backward of regulated cross-attention on a GPU: which pairs have a gradient, and which tiles and chunks they form.
//
// Everything depends on the gradients and on constants only, so the order of all sums is the same for every number of
// blocks.
#pragma once

#include "itm_fast/cuda/regulation_backward_problem.h"
#include "itm_fast/cuda/row_sums.h"

namespace itm_fast::cuda {

// For all threads of the grid: calls body(i) for i below `count`.
template <typename Body>
ITM_FAST_DEVICE void for_all_threads(int64_t count, const Body& body) {
  const int64_t step = grid_blocks() * block_threads();
  for (int64_t i = block_index() * block_threads() + thread_index(); i < count; i += step) body(i);
}
template <typename Body>
ITM_FAST_DEVICE void for_all_warps(int64_t count, const Body& body) {
  const int64_t warps = block_threads() / 32, step = grid_blocks() * warps;
  for (int64_t i = block_index() * warps + warp(); i < count; i += step) body(i);
}

// Marks the pairs with a gradient. NaN counts as one. A warp takes a pair.
ITM_FAST_DEVICE void mark_pairs(const RegulationBackward& p) {
  const SetRows<float>&queries = p.forward.queries, &contexts = p.forward.contexts;
  for_all_warps(queries.n_sets * contexts.n_sets, [&](int64_t pair) {
    const int64_t query = pair % queries.n_sets, context = pair / queries.n_sets;
    const int64_t n_rows = queries.length(query), n_contexts = contexts.length(context);
    bool found = false;
    if (!p.aligns) {
      found = n_rows > 0 && n_contexts > 0 && p.gradients[query * contexts.n_sets + context] != 0.0f;
    } else {
      const float* first = p.gradients + (context * queries.n_rows + queries.offset(query)) * p.forward.width;
      for (int64_t i = lane(); i < n_rows * p.forward.width && !found; i += 32) found = first[i] != 0.0f;
      found = vote_any(found);
    }
    const bool fits = n_rows <= p.forward.rows && n_contexts <= p.forward.columns;
    if (lane() != 0) return;
    if (found && !fits) *p.lists.refused = 1;
    p.lists.rows[pair] = found && fits ? 0 : -1;
  });
}

// Lists the pairs of a context set in order, and cuts them into tiles; for a warp.
template <typename Tile>
ITM_FAST_DEVICE void list_tiles(const RegulationBackward& p, int64_t context) {
  const TileLists& lists = p.lists;
  const int64_t n_queries = p.forward.queries.n_sets, line = context * n_queries;
  int32_t entries = 0, tiles = 0, first_row = 0, rows = 0, sets = 0;
  for (int64_t first = 0; first < n_queries; first += 32) {
    const int64_t query = first + lane();
    const bool listed = query < n_queries && lists.rows[line + query] >= 0;
    const int length = listed ? static_cast<int>(p.forward.queries.length(query)) : 0;
    for (uint32_t lanes = ballot(listed); lanes != 0; lanes &= lanes - 1) {
      const int source = count_bits((lanes ^ (lanes - 1)) >> 1);
      const int more = shuffle(length, source);
      if (rows + more > Tile::kRows || sets == kTileSets) {
        first_row += static_cast<int32_t>(padded(rows));
        rows = sets = 0;
      }
      if (lane() == 0) {
        if (sets == 0) {
          lists.tile_entries[line + tiles] = entries;
          lists.tile_rows[line + tiles] = first_row;
        }
        lists.queries[line + entries] = static_cast<int32_t>(first + source);
        lists.rows[line + first + source] = first_row + rows;
      }
      if (sets == 0) ++tiles;
      ++entries;
      ++sets;
      rows += more;
    }
  }
  if (lane() != 0) return;
  lists.pair_counts[context] = entries;
  lists.tile_counts[context] = tiles;
  lists.row_counts[context] = first_row + static_cast<int32_t>(padded(rows));
}

// Lists the context sets of a query set in order; for a warp.
ITM_FAST_DEVICE void list_contexts_of(const RegulationBackward& p, int64_t query) {
  const int64_t n_contexts = p.forward.contexts.n_sets, n_queries = p.forward.queries.n_sets;
  int32_t count = 0;
  for (int64_t first = 0; first < n_contexts; first += 32) {
    const int64_t context = first + lane();
    const bool listed = context < n_contexts && p.lists.rows[context * n_queries + query] >= 0;
    const uint32_t lanes = ballot(listed);
    const int before = count_bits(lanes & ((uint32_t{1} << lane()) - 1));
    if (listed) p.lists.contexts[query * n_contexts + count + before] = static_cast<int32_t>(context);
    count += count_bits(lanes);
  }
  if (lane() == 0) p.lists.context_counts[query] = count;
}

// Totals before each context set; for a warp.
ITM_FAST_DEVICE void add_up_tiles(const RegulationBackward& p) {
  const TileLists& lists = p.lists;
  const int64_t n_contexts = p.forward.contexts.n_sets;
  int64_t tiles = 0, rows = 0, pairs = 0;
  for (int64_t first = 0; first <= n_contexts; first += 32) {
    const int64_t context = first + lane();
    const bool exists = context < n_contexts;
    const int64_t own[3] = {exists ? lists.tile_counts[context] : 0, exists ? lists.row_counts[context] : 0,
                            exists ? lists.pair_counts[context] : 0};
    int64_t sums[3] = {own[0], own[1], own[2]};
    for (int step = 1; step < 32; step *= 2) {
      for (int64_t& sum : sums) {
        const int64_t before = shuffle(sum, (lane() + 32 - step) % 32);
        if (lane() >= step) sum += before;
      }
    }
    if (context <= n_contexts) {
      lists.first_tile[context] = tiles + sums[0] - own[0];
      lists.first_row[context] = rows + sums[1] - own[1];
    }
    tiles += shuffle(sums[0], 31);
    rows += shuffle(sums[1], 31);
    pairs += shuffle(sums[2], 31);
  }
  if (lane() == 0) *p.n_pairs = pairs;
}

struct ListedTile {
  int64_t context, first_entry, row;  // `row`: its first one among those of all tiles
  int n_sets, n_rows;
};

ITM_FAST_DEVICE ListedTile listed_tile(const RegulationBackward& p, int64_t number) {
  const TileLists& lists = p.lists;
  const int64_t n_queries = p.forward.queries.n_sets;
  const int64_t context = context_of(lists.first_tile, p.forward.contexts.n_sets, number);
  const int64_t tile = number - lists.first_tile[context], line = context * n_queries;
  const int64_t first = lists.tile_entries[line + tile];
  const int64_t end =
      tile + 1 < lists.tile_counts[context] ? lists.tile_entries[line + tile + 1] : lists.pair_counts[context];
  const int64_t last = lists.queries[line + end - 1];
  return {context, first, lists.first_row[context] + lists.tile_rows[line + tile], static_cast<int>(end - first),
          static_cast<int>(lists.rows[line + last] - lists.tile_rows[line + tile] + p.forward.queries.length(last))};
}

// Tiles whose rows fit into the arrays together.
struct TileChunk {
  int64_t first_tile, end_tile;
  int64_t first_row, end_row;

  ITM_FAST_DEVICE int64_t row_of(const ListedTile& tile) const { return tile.row - first_row; }
};

// The chunk that starts with a tile.
ITM_FAST_DEVICE TileChunk chunk_from(const RegulationBackward& p, int64_t first_tile) {
  const int64_t n_tiles = p.lists.first_tile[p.forward.contexts.n_sets];
  const auto row_of = [&](int64_t tile) {
    return tile < n_tiles ? listed_tile(p, tile).row : p.lists.first_row[p.forward.contexts.n_sets];
  };
  const int64_t first_row = row_of(first_tile);
  int64_t last = first_tile + 1, end = n_tiles;  // the largest end that fits; one tile always does
  while (last < end) {
    const int64_t middle = last + (end - last + 1) / 2;
    if (row_of(middle) - first_row <= p.chunk_rows) {
      last = middle;
    } else {
      end = middle - 1;
    }
  }
  return {first_tile, last, first_row, row_of(last)};
}

}  // namespace itm_fast::cuda
