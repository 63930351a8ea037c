// The lengths of sets that a workspace has room for. Host code, shared by the launchers and the tests.
//
// Workspaces are allocated before the device knows the longest set. The caller may know it; kernels never rely on that:
// they compare the length of every set with the room.
#pragma once

#include <algorithm>

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

// The most numbers of all Gram matrices together if a long set of known length widens them.
inline constexpr int64_t kRoomForGrams = 64'000'000;

// Lengths of the longest sets, as the caller says; 0: unknown.
struct LongestSets {
  int64_t queries = 0, contexts = 0;
};

// The length of the longest set if only the average is known: a quarter more.
constexpr int64_t longest_by_average(int64_t n_sets, int64_t n_rows) {
  const int64_t average = n_sets == 0 ? 0 : (n_rows + n_sets - 1) / n_sets;
  return average + average / 4;
}

// The length of the longest set that has a Gram matrix: `longest` if it is known and the matrices of all sets have room
// for it, but at least `otherwise`.
constexpr int64_t longest_with_gram(int64_t longest, int64_t n_rows, int64_t otherwise) {
  if (longest <= 0) return otherwise;
  return std::min(longest, std::max(otherwise, kRoomForGrams / std::max<int64_t>(n_rows, 1)));
}

// Whether the longest set, or if its length is unknown the average set, is no longer than a tile.
constexpr bool fit_tile(int64_t longest, int64_t n_sets, int64_t n_rows, int64_t tile) {
  return longest > 0 ? longest <= tile : n_rows <= n_sets * tile;
}

// The rows of a slab: `tile`, or more for longer sets.
template <typename S>
int64_t slab_rows(const SetRows<S>& sets, int64_t longest, int64_t tile, int64_t most) {
  if (sets.n_sets == 0 || fit_tile(longest, sets.n_sets, sets.n_rows, tile)) return tile;
  const int64_t allowed = longest > 0 ? longest : longest_by_average(sets.n_sets, sets.n_rows);
  return gram_stride(static_cast<int>(std::min(allowed, most)));
}

}  // namespace itm_fast::cuda
