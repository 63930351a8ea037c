// Row blocks of triplet_loss on the CPU: mining, sums of hinges, and their gradient.
//
// One pass over the scores serves both directions: the rows of a block are finished as they come, the columns keep a
// running best and a running sum per block. A block works on tiles of columns; a tile of one row is first copied into a
// buffer in which everything that is no negative is -inf, so that the loops behind it need no masks and no tails.
#pragma once

#include <type_traits>

#include "cpu/kernels/triplet_loss.h"
#include "itm_fast/cpu/simd.h"

namespace itm_fast::ITM_FAST_ISA {

inline constexpr int64_t kTileColumns = 4096;

template <typename T>
inline constexpr T kMinusInfinity = -__builtin_huge_valf();

template <typename T>
ITM_FAST_INLINE Vector<T> hinge_vector(Vector<T> negative, Vector<T> shift) {
  const Vector<T> x = negative + shift;
  return x <= splat(T(0)) ? splat(T(0)) : x;
}

template <typename T>
ITM_FAST_INLINE bool any_lane(Mask<T> mask) {
  typename std::remove_reference<decltype(mask[0] + 0)>::type any = 0;
  for (int i = 0; i < kLanes<T>; ++i) any |= mask[i];
  return any != 0;
}

// Columns [first, first + count) of a row, up to a whole vector, with -inf where no negative is: the scores themselves
// where nothing needs to change, else a copy in `buffer`. `has_nan` says whether a NaN is among the negatives.
template <typename T>
inline const T* negatives_of(const TripletBlock<T>& block, int64_t row, int64_t first, int64_t count, T* buffer,
                             bool& has_nan) {
  const T* source = block.scores + row * block.columns + first;
  const uint8_t* positive = block.positives == nullptr ? nullptr : block.positives + row * block.columns + first;
  const bool on_diagonal = block.exclude_diagonal && row >= first && row < first + count;
  const int64_t whole = count / kLanes<T> * kLanes<T>;
  Mask<T> unordered{};
  if (positive == nullptr && !on_diagonal && whole == count) {
    for (int64_t j = 0; j < count; j += kLanes<T>) {
      const Vector<T> value = load(source + j);
      unordered |= value != value;
    }
    has_nan = any_lane<T>(unordered);
    return source;
  }
  if (whole < count) store(buffer + whole, splat(kMinusInfinity<T>));
  if (positive == nullptr) {
    for (int64_t j = 0; j < count; ++j) buffer[j] = source[j];
  } else {
    for (int64_t j = 0; j < count; ++j) buffer[j] = positive[j] ? kMinusInfinity<T> : source[j];
  }
  if (on_diagonal) buffer[row - first] = kMinusInfinity<T>;
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    const Vector<T> value = load(buffer + j);
    unordered |= value != value;
  }
  has_nan = any_lane<T>(unordered);
  return buffer;
}

// Takes what is not below its positive out of a tile; NaN stays.
template <typename T>
inline const T* keep_below(const T* tile, int64_t count, const T* positive, int64_t step, T* kept) {
  const Vector<T> excluded = splat(kMinusInfinity<T>);
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    const Vector<T> value = load(tile + j);
    const Vector<T> limit = step == 0 ? splat(*positive) : load(positive + j);
    store(kept + j, value >= limit ? excluded : value);
  }
  return kept;
}

template <typename T>
inline void scan_row_best(const T* tile, int64_t first, int64_t count, bool has_nan, T& best, int64_t& index) {
  if (best != best) return;
  if (has_nan) {
    int64_t j = 0;
    while (tile[j] == tile[j]) ++j;
    best = tile[j];
    index = first + j;
    return;
  }
  Vector<T> highest = load(tile);
  Mask<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  Mask<T> where = lane;
  for (int64_t j = kLanes<T>; j < count; j += kLanes<T>) {
    lane += kLanes<T>;
    const Vector<T> value = load(tile + j);
    const Mask<T> higher = value > highest;
    highest = higher ? value : highest;
    where = higher ? lane : where;
  }
  T tile_best = highest[0];
  int64_t tile_index = where[0];
  for (int i = 1; i < kLanes<T>; ++i) {
    if (highest[i] > tile_best || (highest[i] == tile_best && where[i] < tile_index)) {
      tile_best = highest[i];
      tile_index = where[i];
    }
  }
  if (tile_best > best) {
    best = tile_best;
    index = first + tile_index;
  }
}

template <typename T>
inline void scan_column_best(const T* tile, int64_t count, bool has_nan, LaneInteger<T> row, T* best,
                             LaneInteger<T>* index) {
  if (has_nan) {
    for (int64_t j = 0; j < count; ++j) {
      const bool higher = tile[j] > best[j] || (tile[j] != tile[j] && best[j] == best[j]);
      best[j] = higher ? tile[j] : best[j];
      index[j] = higher ? row : index[j];
    }
    return;
  }
  const Mask<T> here = Mask<T>{} + row;
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    const Vector<T> value = load(tile + j), old = load(best + j);
    Mask<T> where;
    __builtin_memcpy(&where, index + j, sizeof(where));
    const Mask<T> higher = value > old;
    where = higher ? here : where;
    store(best + j, higher ? value : old);
    __builtin_memcpy(index + j, &where, sizeof(where));
  }
}

template <typename T>
inline T scan_row_sum(const T* tile, int64_t count, T shift) {
  Vector<T> sum{};
  for (int64_t j = 0; j < count; j += kLanes<T>) sum += hinge_vector<T>(load(tile + j), splat(shift));
  return sum_lanes<T>(sum);
}

template <typename T>
inline void scan_column_sum(const T* tile, int64_t count, T margin, const T* positive, T* sum) {
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    store(sum + j, load(sum + j) + hinge_vector<T>(load(tile + j), splat(margin) - load(positive + j)));
  }
}

template <typename T>
inline void scan_block(const TripletBlock<T>& block, const TripletScan<T>& scan) {
  alignas(64) T buffer[kTileColumns], kept[kTileColumns];
  for (int64_t row = block.first_row; row < block.last_row; ++row) {
    if (scan.row_best != nullptr) {
      scan.row_best[row] = kMinusInfinity<T>;
      scan.row_index[row] = 0;
    }
    if (scan.row_sum != nullptr) scan.row_sum[row] = 0.0;
  }
  for (int64_t first = 0; first < block.columns; first += kTileColumns) {
    const int64_t count = block.columns - first < kTileColumns ? block.columns - first : kTileColumns;
    for (int64_t j = first; j < first + padded_to_lanes(count); ++j) {
      if (scan.column_best != nullptr) {
        scan.column_best[j] = kMinusInfinity<T>;
        scan.column_index[j] = 0;
      }
      if (scan.column_sum != nullptr) scan.column_sum[j] = T(0);
    }
    for (int64_t row = block.first_row; row < block.last_row; ++row) {
      bool has_nan;
      const T* negatives = negatives_of(block, row, first, count, buffer, has_nan);
      if (scan.row_best != nullptr) {
        const T* tile = scan.semi_hard ? keep_below(negatives, count, block.row_positive + row, 0, kept) : negatives;
        scan_row_best(tile, first, count, has_nan, scan.row_best[row], scan.row_index[row]);
      }
      if (scan.row_sum != nullptr) {
        scan.row_sum[row] += scan_row_sum(negatives, count, block.margin - block.row_positive[row]);
      }
      if (scan.column_best != nullptr) {
        const T* tile =
            scan.semi_hard ? keep_below(negatives, count, block.column_positive + first, 1, kept) : negatives;
        scan_column_best(tile, count, has_nan, static_cast<LaneInteger<T>>(row - block.first_row),
                         scan.column_best + first, scan.column_index + first);
      }
      if (scan.column_sum != nullptr) {
        scan_column_sum(negatives, count, block.margin, block.column_positive + first, scan.column_sum + first);
      }
    }
  }
}

template <typename T>
inline void spread_block(const TripletBlock<T>& block, const TripletSpread<T>& spread) {
  alignas(64) T buffer[kTileColumns], result[kTileColumns];
  const Vector<T> zero{}, excluded = splat(kMinusInfinity<T>);
  for (int64_t row = block.first_row; row < block.last_row; ++row) {
    if (spread.row_count != nullptr) spread.row_count[row] = 0;
  }
  for (int64_t first = 0; first < block.columns; first += kTileColumns) {
    const int64_t count = block.columns - first < kTileColumns ? block.columns - first : kTileColumns;
    if (spread.column_count != nullptr) {
      for (int64_t j = first; j < first + padded_to_lanes(count); ++j) spread.column_count[j] = 0;
    }
    for (int64_t row = block.first_row; row < block.last_row; ++row) {
      bool has_nan;
      const T* negatives = negatives_of(block, row, first, count, buffer, has_nan);
      const T shift = spread.row_weight != nullptr ? block.margin - block.row_positive[row] : T(0);
      const T weight = spread.row_weight != nullptr ? spread.row_weight[row] : T(0);
      Mask<T> row_count{};
      for (int64_t j = 0; j < count; j += kLanes<T>) {
        const Vector<T> value = load(negatives + j);
        const Mask<T> negative = value != excluded;
        Vector<T> gradient = zero;
        if (spread.row_weight != nullptr) {
          const Mask<T> active = ~(value + splat(shift) <= zero) & negative;
          gradient = active ? splat(weight) : zero;
          row_count -= active;
        }
        if (spread.column_weight != nullptr) {
          const Vector<T> margin = splat(block.margin) - load(block.column_positive + first + j);
          const Mask<T> active = ~(value + margin <= zero) & negative;
          gradient += active ? load(spread.column_weight + first + j) : zero;
          Mask<T> column_count;
          __builtin_memcpy(&column_count, spread.column_count + first + j, sizeof(column_count));
          column_count -= active;
          __builtin_memcpy(spread.column_count + first + j, &column_count, sizeof(column_count));
        }
        store(result + j, gradient);
      }
      __builtin_memcpy(spread.gradient + row * block.columns + first, result, count * sizeof(T));
      if (spread.row_count != nullptr) {
        for (int i = 0; i < kLanes<T>; ++i) spread.row_count[row] += row_count[i];
      }
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
