// Row blocks of the gradient of triplet_loss on the CPU for sums of hinges, with those sums if requested; and the
// scaling of a gradient.
#pragma once

#include "itm_fast/cpu/triplet_tiles.h"

namespace itm_fast::ITM_FAST_ISA {

// Processes rows [first_row, last_row), at most kRowsTogether, over the columns [first, first + count) and writes their
// gradient to `targets`. All vectors are whole except the last one.
template <typename T, int kGoals, bool kAccumulates>
inline void spread_tile(const TripletBlock<T>& block, const TripletSpread<T>& spread, const T* const* negatives,
                        T* const* targets, int64_t first_row, int64_t last_row, int64_t first, int64_t count) {
  constexpr bool kSum = kGoals & kSums, kRows = kGoals & kOfRows, kColumns = kGoals & kOfColumns;
  const Vector<T> zero{}, excluded = splat(kMinusInfinity<T>);
  Vector<T> row_sum[kRowsTogether], shift[kRowsTogether], weight[kRowsTogether];
  Mask<T> row_count[kRowsTogether];
  for (int r = 0; r < kRowsTogether; ++r) {
    const int64_t row = first_row + r < last_row ? first_row + r : first_row;
    row_sum[r] = zero;
    row_count[r] = Mask<T>{};
    shift[r] = kRows ? splat(block.margin) - splat(block.row_positive[row]) : zero;
    weight[r] = kRows ? splat(spread.row_weight[row]) : zero;
  }
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    Vector<T> column_sum{}, column_shift{}, column_weight{};
    Mask<T> column_count{};
    if constexpr (kColumns) {
      column_shift = splat(block.margin) - load(block.column_positive + first + j);
      column_weight = load(spread.column_weight + first + j);
      column_count = load_mask<T>(spread.column_count + first + j);
      if constexpr (kSum) column_sum = load(spread.column_sum + first + j);
    }
    const bool whole = j + kLanes<T> <= count;
    const int64_t bytes = (whole ? kLanes<T> : count - j) * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 8
    for (int r = 0; r < kRowsTogether; ++r) {
      const Vector<T> value = load(negatives[r] + j);
      const Mask<T> negative = value != excluded;
      Vector<T> gradient = zero;
      if constexpr (kRows) {
        const Vector<T> x = value + shift[r];
        const Mask<T> active = ~(x <= zero);
        gradient = active & negative ? weight[r] : zero;
        row_count[r] -= active & negative;
        if constexpr (kSum) row_sum[r] += active ? x : zero;
      }
      if constexpr (kColumns) {
        const Vector<T> x = value + column_shift;
        const Mask<T> active = ~(x <= zero);
        gradient += active & negative ? column_weight : zero;
        column_count -= active & negative;
        if constexpr (kSum) column_sum += active ? x : zero;
      }
      if (whole) {
        if constexpr (kAccumulates) gradient += load(targets[r] + j);
        store(targets[r] + j, gradient);
      } else {
        Vector<T> before = zero;
        if constexpr (kAccumulates) __builtin_memcpy(&before, targets[r] + j, bytes);
        gradient += before;
        __builtin_memcpy(targets[r] + j, &gradient, bytes);
      }
    }
    if constexpr (kColumns) {
      store_mask<T>(spread.column_count + first + j, column_count);
      if constexpr (kSum) store(spread.column_sum + first + j, column_sum);
    }
  }
  for (int64_t row = first_row; kRows && row < last_row; ++row) {
    const int r = static_cast<int>(row - first_row);
    for (int i = 0; i < kLanes<T>; ++i) spread.row_count[row] += row_count[r][i];
    if constexpr (kSum) spread.row_sum[row] += sum_lanes<T>(row_sum[r]);
  }
}

template <typename T, int kGoals>
inline void spread_rows(const TripletBlock<T>& block, const TripletSpread<T>& spread) {
  constexpr int64_t kTile = kTileColumns<T>;
  alignas(64) T beyond[kTile];
  T* targets[kRowsTogether];
  for_row_groups(block, [&](const T* const* negatives, int64_t row, int64_t last_row, int64_t first, int64_t count) {
    for (int r = 0; r < kRowsTogether; ++r) {
      targets[r] = row + r < last_row ? spread.gradient + (row + r) * block.columns + first : beyond;
    }
    if (spread.accumulates) {
      spread_tile<T, kGoals, true>(block, spread, negatives, targets, row, last_row, first, count);
    } else {
      spread_tile<T, kGoals, false>(block, spread, negatives, targets, row, last_row, first, count);
    }
  });
}

template <typename T, int kSides>
inline void spread_sides(const TripletBlock<T>& block, const TripletSpread<T>& spread) {
  if (spread.row_sum != nullptr || spread.column_sum != nullptr) {
    spread_rows<T, kSums | kSides>(block, spread);
  } else {
    spread_rows<T, kSides>(block, spread);
  }
}

template <typename T>
inline void spread_block(const TripletBlock<T>& block, const TripletSpread<T>& spread) {
  const bool rows = spread.row_weight != nullptr, columns = spread.column_weight != nullptr;
  for (int64_t row = block.first_row; rows && row < block.last_row; ++row) {
    spread.row_count[row] = 0;
    if (spread.row_sum != nullptr) spread.row_sum[row] = 0.0;
  }
  for (int64_t j = 0; columns && j < padded_to_lanes(block.columns); ++j) {
    spread.column_count[j] = 0;
    if (spread.column_sum != nullptr) spread.column_sum[j] = T(0);
  }
  if (!columns) {
    spread_sides<T, kOfRows>(block, spread);
  } else if (!rows) {
    spread_sides<T, kOfColumns>(block, spread);
  } else {
    spread_sides<T, kOfRows | kOfColumns>(block, spread);
  }
}

// Elements that are 0 stay 0, whatever the factor; groups of vectors with zeros only are not written.
template <typename T>
inline void scale_elements(T* values, int64_t count, T factor) {
  constexpr int kVectors = 8;
  constexpr int64_t kGroup = kVectors * kLanes<T>;
  const Vector<T> zero{}, by = splat(factor);
  alignas(64) T last[kGroup];
  for (int64_t i = 0; i < count; i += kGroup) {
    const bool whole = i + kGroup <= count;
    T* const group = whole ? values + i : last;
    if (!whole) {
      for (int64_t j = 0; j < kGroup; ++j) last[j] = i + j < count ? values[i + j] : T(0);
    }
    Mask<T> other{};
    for (int v = 0; v < kVectors; ++v) other |= load(group + v * kLanes<T>) != zero;
    if (!any_lane<T>(other)) continue;
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> value = load(group + v * kLanes<T>);
      store(group + v * kLanes<T>, value != zero ? value * by : value);
    }
    for (int64_t j = 0; !whole && i + j < count; ++j) values[i + j] = last[j];
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
