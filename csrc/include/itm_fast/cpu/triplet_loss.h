// Row blocks of triplet_loss on the CPU: mining and sums of hinges.
#pragma once

#include "itm_fast/cpu/triplet_tiles.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename T>
ITM_FAST_INLINE Vector<T> hinge_vector(Vector<T> negative, Vector<T> shift) {
  const Vector<T> x = negative + shift;
  return x <= splat(T(0)) ? splat(T(0)) : x;
}

// The best of the lanes; among equal ones, the one with the lowest index.
template <typename T>
inline T best_lane(Vector<T> values, Mask<T> indices, int64_t& index) {
  T best = values[0];
  index = indices[0];
  for (int i = 1; i < kLanes<T>; ++i) {
    if (values[i] > best || (values[i] == best && indices[i] < index)) {
      best = values[i];
      index = indices[i];
    }
  }
  return best;
}

// Comparisons skip NaN, so this makes NaN the best of its row and of its column; the first NaN stays.
template <typename T>
inline void take_nan(const TripletBlock<T>& block, const TripletScan<T>& scan, const T* negatives, int64_t row,
                     int64_t first, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    if (negatives[j] == negatives[j]) continue;
    if (scan.row_best != nullptr && scan.row_best[row] == scan.row_best[row]) {
      scan.row_best[row] = negatives[j];
      scan.row_index[row] = first + j;
    }
    if (scan.column_best != nullptr && scan.column_best[first + j] == scan.column_best[first + j]) {
      scan.column_best[first + j] = negatives[j];
      scan.column_index[first + j] = static_cast<LaneInteger<T>>(row - block.first_row);
    }
  }
}

// Processes rows [first_row, last_row), at most kRowsTogether, over the columns [first, first + count).
template <typename T, int kGoals>
inline void scan_tile(const TripletBlock<T>& block, const TripletScan<T>& scan, const T* const* negatives,
                      int64_t first_row, int64_t last_row, int64_t first, int64_t count) {
  constexpr bool kBest = kGoals & kBests, kSum = kGoals & kSums, kFilter = kGoals & kBelow;
  constexpr bool kRows = kGoals & kOfRows, kColumns = kGoals & kOfColumns;
  const Vector<T> excluded = splat(kMinusInfinity<T>);
  Vector<T> row_best[kRowsTogether], row_sum[kRowsTogether], row_positive[kRowsTogether];
  Mask<T> row_where[kRowsTogether], unordered{}, lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  for (int r = 0; r < kRowsTogether; ++r) {
    row_best[r] = excluded;
    row_where[r] = Mask<T>{};
    row_sum[r] = Vector<T>{};
    const int64_t row = first_row + r < last_row ? first_row + r : first_row;
    row_positive[r] = kRows ? splat(block.row_positive[row]) : Vector<T>{};
  }
  const Mask<T> in_block = Mask<T>{} + static_cast<LaneInteger<T>>(first_row - block.first_row);
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    Vector<T> column_best{}, column_sum{}, column_positive{};
    Mask<T> column_where{};
    if constexpr (kColumns && (kSum || kFilter)) column_positive = load(block.column_positive + first + j);
    if constexpr (kColumns && kSum) column_sum = load(scan.column_sum + first + j);
    if constexpr (kColumns && kBest) {
      column_best = load(scan.column_best + first + j);
      column_where = load_mask<T>(scan.column_index + first + j);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      const Vector<T> value = load(negatives[r] + j);
      if constexpr (kBest) unordered |= value != value;
      if constexpr (kBest && kRows) {
        const Vector<T> candidate = kFilter ? (value >= row_positive[r] ? excluded : value) : value;
        const Mask<T> higher = candidate > row_best[r];
        row_best[r] = higher ? candidate : row_best[r];
        row_where[r] = higher ? lane : row_where[r];
      }
      if constexpr (kBest && kColumns) {
        const Vector<T> candidate = kFilter ? (value >= column_positive ? excluded : value) : value;
        const Mask<T> higher = candidate > column_best;
        column_best = higher ? candidate : column_best;
        column_where = higher ? in_block + r : column_where;
      }
      if constexpr (kSum && kRows) row_sum[r] += hinge_vector<T>(value, splat(block.margin) - row_positive[r]);
      if constexpr (kSum && kColumns) column_sum += hinge_vector<T>(value, splat(block.margin) - column_positive);
    }
    if constexpr (kColumns && kSum) store(scan.column_sum + first + j, column_sum);
    if constexpr (kColumns && kBest) {
      store(scan.column_best + first + j, column_best);
      store_mask<T>(scan.column_index + first + j, column_where);
    }
    lane += kLanes<T>;
  }
  for (int64_t row = first_row; kRows && row < last_row; ++row) {
    const int r = static_cast<int>(row - first_row);
    if constexpr (kSum) scan.row_sum[row] += sum_lanes<T>(row_sum[r]);
    if constexpr (kBest) {
      int64_t index;
      const T best = best_lane<T>(row_best[r], row_where[r], index);
      if (best > scan.row_best[row]) {
        scan.row_best[row] = best;
        scan.row_index[row] = first + index;
      }
    }
  }
  if (kBest && any_lane<T>(unordered)) {
    for (int64_t row = first_row; row < last_row; ++row) {
      take_nan(block, scan, negatives[row - first_row], row, first, count);
    }
  }
}

template <typename T, int kGoals>
inline void scan_rows(const TripletBlock<T>& block, const TripletScan<T>& scan) {
  for_row_groups(block, [&](const T* const* negatives, int64_t row, int64_t last_row, int64_t first, int64_t count) {
    scan_tile<T, kGoals>(block, scan, negatives, row, last_row, first, count);
  });
}

template <typename T, int kSides>
inline void scan_sides(const TripletBlock<T>& block, const TripletScan<T>& scan, bool best, bool sum) {
  if (!best) {
    scan_rows<T, kSums | kSides>(block, scan);
  } else if (sum) {
    scan_rows<T, kBests | kSums | kSides>(block, scan);
  } else if (scan.semi_hard) {
    scan_rows<T, kBests | kBelow | kSides>(block, scan);
  } else {
    scan_rows<T, kBests | kSides>(block, scan);
  }
}

template <typename T>
inline void scan_block(const TripletBlock<T>& block, const TripletScan<T>& scan) {
  const bool best = scan.row_best != nullptr || scan.column_best != nullptr;
  const bool sum = scan.row_sum != nullptr || scan.column_sum != nullptr;
  for (int64_t row = block.first_row; row < block.last_row; ++row) {
    if (scan.row_best != nullptr) scan.row_best[row] = kMinusInfinity<T>;
    if (scan.row_best != nullptr) scan.row_index[row] = 0;
    if (scan.row_sum != nullptr) scan.row_sum[row] = 0.0;
  }
  for (int64_t j = 0; j < padded_to_lanes(block.columns); ++j) {
    if (scan.column_best != nullptr) scan.column_best[j] = kMinusInfinity<T>;
    if (scan.column_best != nullptr) scan.column_index[j] = 0;
    if (scan.column_sum != nullptr) scan.column_sum[j] = T(0);
  }
  if (block.column_positive == nullptr) {
    scan_sides<T, kOfRows>(block, scan, best, sum);
  } else if (block.row_positive == nullptr) {
    scan_sides<T, kOfColumns>(block, scan, best, sum);
  } else {
    scan_sides<T, kOfRows | kOfColumns>(block, scan, best, sum);
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
