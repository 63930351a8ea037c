// Shared by kernels over a score matrix: the tiles, and the problem of triplet_loss.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast::cuda {

// A warp takes kRowsPerWarp rows one after another, a lane every 32nd column.
template <int kWarpsOfBlock, int kRowsOfWarp, int kColumnsOfLane>
struct ScoreTile {
  static constexpr int kWarps = kWarpsOfBlock, kThreads = 32 * kWarps;
  static constexpr int kRowsPerWarp = kRowsOfWarp, kColumnsPerLane = kColumnsOfLane;
  static constexpr int kRows = kWarps * kRowsPerWarp, kColumns = 32 * kColumnsPerLane;
};

using SmallTile = ScoreTile<8, 2, 2>;  // 16 x 64: enough blocks for a training batch
using LargeTile = ScoreTile<8, 8, 4>;  // 64 x 128: few partial results

// Matrices with more elements than this use large tiles.
inline constexpr int64_t kLargeTilesFrom = int64_t{1} << 20;

// At least one, so that empty matrices have a block that writes their results.
constexpr int64_t tiles_of(int64_t size, int64_t tile) { return size > tile ? (size + tile - 1) / tile : 1; }

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
constexpr T infinity() {
  return static_cast<T>(__builtin_huge_val());
}

// The score matrix, dense, and the excluded pairs. Kernels treat a loss as one or more parts, each a triplet loss with
// keys for scores; BoostingProblem has the same functions.
template <typename Number>
struct TripletProblem {
  using T = Number;
  static constexpr int kMaxParts = 1;

  const T* scores;
  const bool* positives;     // null: only the diagonal
  const T* positive_scores;  // null: they are on the diagonal
  int64_t rows, columns;

  constexpr int parts() const { return 1; }
  constexpr bool has_diagonal() const { return positive_scores == nullptr; }
  ITM_FAST_DEVICE T margin(int, const TripletOptions& options) const { return static_cast<T>(options.margin); }
  // The value that an anchor's negatives are compared with.
  ITM_FAST_DEVICE T positive(int, int64_t anchor) const {
    return has_diagonal() ? scores[anchor * columns + anchor] : positive_scores[anchor];
  }
  // The anchor's value for computing keys in addition to the pair itself, and the key of the pair at `at`.
  ITM_FAST_DEVICE T own(int, int64_t) const { return T(0); }
  ITM_FAST_DEVICE T key(int, int64_t at, T) const { return scores[at]; }
  constexpr bool shares_keys(int) const { return true; }  // between rows and columns
  // A term of the positive only, once per anchor or, if all negatives take part, once per negative.
  constexpr bool has_positive_term(int) const { return false; }
  ITM_FAST_DEVICE T positive_term(int, int64_t) const { return T(0); }

  ITM_FAST_DEVICE bool is_negative(int64_t row, int64_t column) const {
    return !(has_diagonal() && row == column) && !(positives != nullptr && positives[row * columns + column]);
  }
  // A square batch holds the anchor's positive among its negatives; separate positives are added to them.
  ITM_FAST_DEVICE T divisor(const TripletOptions& options, int64_t candidates) const {
    const int64_t divisor =
        candidates + (has_diagonal() ? 0 : 1) - (options.selective_divisor == SelectiveDivisor::negatives ? 1 : 0);
    return static_cast<T>(divisor > 1 ? divisor : 1);
  }
};

}  // namespace itm_fast::cuda
