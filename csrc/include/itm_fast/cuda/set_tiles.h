// Ragged sets on a GPU: offsets clamped to the rows, and the tiles that whole sets are packed into.
//
// A tile is a run of sets with at most `max_rows` rows together, or one longer set by itself. Invalid offsets give
// wrong tiles, but no access outside of any array.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// Sets per tile: as many as a warp has lanes, so that each lane examines one.
inline constexpr int kTileSets = 32;

// Sets up to these lengths are multiplied on tensor cores.
inline constexpr int kMostContexts = 640, kMostQueries = 512;

template <typename S>
struct SetRows {
  const S* values;      // (n_rows, dim), dense
  const void* offsets;  // (n_sets + 1,), int64 or int32
  bool has_wide_offsets;
  int64_t n_sets, n_rows;

  ITM_FAST_DEVICE int64_t offset(int64_t set) const {
    if (set <= 0) return 0;
    const int64_t given = has_wide_offsets ? static_cast<const int64_t*>(offsets)[set]
                                           : static_cast<int64_t>(static_cast<const int32_t*>(offsets)[set]);
    return given < 0 ? 0 : given > n_rows ? n_rows : given;
  }
  ITM_FAST_DEVICE int64_t length(int64_t set) const {
    const int64_t length = offset(set + 1) - offset(set);
    return length > 0 ? length : 0;
  }
};

// Whether all rows are aligned to 16 bytes, as asynchronous copies require.
template <typename S>
bool rows_are_aligned(const SetRows<S>& queries, const SetRows<S>& contexts, int64_t dim) {
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  return is_aligned(queries.values) && is_aligned(contexts.values) && dim * sizeof(S) % 16 == 0;
}

// The tiles of one side: tile t holds the sets from first_set[t] up to first_set[t + 1].
struct TilePlan {
  int64_t* first_set;  // (capacity + 1,)
  int64_t* n_tiles;
  int64_t capacity;
};

// Maximum number of tiles of a plan: two adjacent tiles have more than `max_rows` rows together, or one has kTileSets
// sets.
constexpr int64_t most_tiles(int64_t n_sets, int64_t n_rows, int64_t max_rows) {
  const int64_t bound = 2 * n_rows / (max_rows + 1) + n_sets / kTileSets + 1;
  return bound < n_sets ? bound : n_sets;
}

inline void place_plan(TilePlan& plan, int64_t capacity, Workspace& workspace) {
  plan.capacity = capacity;
  plan.first_set = workspace.take<int64_t>(capacity + 1);
  plan.n_tiles = workspace.take<int64_t>(1);
}

ITM_FAST_DEVICE int count_trailing_ones(uint32_t bits) { return count_bits(bits & (bits ^ (bits + 1))); }

// Writes the plan; for the threads of one block. Shared memory holds kWindow sets at a time.
template <int kWindow, typename S>
ITM_FAST_DEVICE void plan_tiles(const SetRows<S>& sets, int64_t max_rows, const TilePlan& plan) {
  static_assert(kWindow >= kTileSets);
  ITM_FAST_SHARED(int64_t, window, kWindow + 1);
  ITM_FAST_SHARED(int64_t, planned, 1);
  int64_t tiles = 0;  // counted by the first warp
  for (int64_t first = 0; first < sets.n_sets;) {
    const int64_t left = sets.n_sets - first, held = left < kWindow ? left : kWindow;
    for (int64_t i = thread_index(); i <= held; i += block_threads()) window[i] = sets.offset(first + i);
    barrier();
    if (warp() == 0) {
      int64_t set = 0;
      // A tile may extend over up to kTileSets more sets; if the window ends before that, the next window starts with
      // it.
      while (set < held && (set + kTileSets <= held || held == left)) {
        const int64_t last = set + lane();
        const bool fits = last < held && window[last < held ? last + 1 : held] - window[set] <= max_rows;
        const int count = count_trailing_ones(ballot(fits));
        if (lane() == 0 && tiles < plan.capacity) plan.first_set[tiles] = first + set;
        ++tiles;
        set += count > 0 ? count : 1;
      }
      if (lane() == 0) planned[0] = set;
    }
    barrier();
    first += planned[0];
    barrier();
  }
  if (thread_index() == 0) {
    const int64_t kept = tiles < plan.capacity ? tiles : plan.capacity;
    plan.first_set[kept] = sets.n_sets;
    *plan.n_tiles = kept;
  }
}

// The sets of a block's tile on one side.
struct TileSets {
  int64_t first_set, first_row;
  int n_sets;
  bool is_long;  // one set that is longer than a tile
};

template <typename S>
ITM_FAST_DEVICE TileSets open_tile(const SetRows<S>& sets, const TilePlan& plan, int64_t tile, int max_rows) {
  TileSets opened;
  opened.first_set = plan.first_set[tile];
  const int64_t n_sets = plan.first_set[tile + 1] - opened.first_set;
  opened.n_sets = static_cast<int>(n_sets < kTileSets ? n_sets : kTileSets);
  opened.first_row = sets.offset(opened.first_set);
  opened.is_long = opened.n_sets == 1 && sets.length(opened.first_set) > max_rows;
  return opened;
}

// A tile of one set.
template <typename S>
ITM_FAST_DEVICE TileSets one_set(const SetRows<S>& sets, int64_t set, int max_rows) {
  return {set, sets.offset(set), 1, sets.length(set) > max_rows};
}

// The rows at which the sets of a tile begin in it: starts[i] for i up to n_sets, from 0 to the number of rows. For the
// threads of one warp.
template <typename S>
ITM_FAST_DEVICE void find_starts(const SetRows<S>& sets, const TileSets& tile, int max_rows,
                                 SharedArray<int32_t> starts) {
  const int set = lane() < tile.n_sets ? lane() + 1 : tile.n_sets;
  const int64_t given = sets.offset(tile.first_set + set) - tile.first_row;
  int32_t start = static_cast<int32_t>(given < 0 ? 0 : given > max_rows ? max_rows : given);
  for (int step = 1; step < 32; step *= 2) {
    const int32_t before = shuffle(start, (lane() + 32 - step) % 32);
    if (lane() >= step && before > start) start = before;
  }
  if (lane() == 0) starts[0] = 0;
  if (lane() < tile.n_sets) starts[lane() + 1] = start;
}

}  // namespace itm_fast::cuda
