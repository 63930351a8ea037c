// Row blocks of triplet_loss on the CPU: mining, sums of hinges, and their gradient.
//
// One pass over the scores serves both directions. A block works on tiles of columns, and takes several rows through a
// tile together, so that the columns' running bests and sums are read and written once for all of them. What is no
// negative stands as -inf: a tile of a row is copied only where something must be taken out of it.
#pragma once

#include <type_traits>

#include "cpu/kernels/triplet_loss.h"
#include "itm_fast/cpu/simd.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename T>
inline constexpr int64_t kTileColumns = 4096 / sizeof(T);

// Rows that go through a tile together; each holds a best and its lane in registers.
#if defined(__AVX512F__)
inline constexpr int kRowsTogether = 8;
#else
inline constexpr int kRowsTogether = 4;
#endif

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

template <typename T>
ITM_FAST_INLINE Mask<T> load_mask(const LaneInteger<T>* source) {
  Mask<T> value;
  __builtin_memcpy(&value, source, sizeof(value));
  return value;
}

template <typename T>
ITM_FAST_INLINE void store_mask(LaneInteger<T>* target, Mask<T> value) {
  __builtin_memcpy(target, &value, sizeof(value));
}

template <typename T>
ITM_FAST_INLINE Vector<T> gap_vector(const PairKey<T>& key, Vector<T> score, Vector<T> anchor_score, Vector<T> own) {
  const Vector<T> gap = score - anchor_score;
  if (key.margin.slope == T(0)) return gap;
  const bool relative = key.row_own != nullptr || key.column_own != nullptr;
  const Vector<T> r = relative ? own - anchor_score : anchor_score;
  const Vector<T> grown = exp_vector(splat(key.margin.slope) * (r - splat(key.margin.end)));
  return splat(T(2) * key.margin.size) / (splat(T(1)) + grown) - splat(key.margin.size) + gap;
}

// The gaps of columns [first, first + count) of a row, up to a whole vector.
template <typename T>
inline void fill_gaps(const TripletBlock<T>& block, int64_t row, int64_t first, int64_t count, T* gaps) {
  const T* scores = block.scores + row * block.columns + first;
  const T* anchor_scores = block.key.anchor_scores + row * block.columns + first;
  Vector<T> own = block.key.row_own != nullptr ? splat(block.key.row_own[row]) : Vector<T>{};
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    if (block.key.column_own != nullptr) own = load(block.key.column_own + first + j);
    Vector<T> score{}, anchor_score{};
    const int64_t bytes = (count - j < kLanes<T> ? count - j : kLanes<T>)*static_cast<int64_t>(sizeof(T));
    __builtin_memcpy(&score, scores + j, bytes);
    __builtin_memcpy(&anchor_score, anchor_scores + j, bytes);
    store(gaps + j, gap_vector(block.key, score, anchor_score, own));
  }
}

// Columns [first, first + count) of a row, up to a whole vector, with -inf where no negative is: the scores themselves
// where nothing needs to change, else what stands for them in `buffer`.
template <typename T>
inline const T* negatives_of(const TripletBlock<T>& block, int64_t row, int64_t first, int64_t count, T* buffer) {
  const T* source = block.scores + row * block.columns + first;
  const bool on_diagonal = block.exclude_diagonal && row >= first && row < first + count;
  const int64_t whole = count / kLanes<T> * kLanes<T>;
  if (block.key.anchor_scores != nullptr) {
    fill_gaps(block, row, first, count, buffer);
    source = buffer;
  }
  if (block.positives == nullptr && !on_diagonal && whole == count) return source;
  if (block.positives != nullptr) {
    const uint8_t* positive = block.positives + row * block.columns + first;
    for (int64_t j = 0; j < count; ++j) buffer[j] = positive[j] ? kMinusInfinity<T> : source[j];
  } else if (source != buffer) {
    for (int64_t j = 0; j < count; ++j) buffer[j] = source[j];
  }
  for (int64_t j = count; j < whole + kLanes<T> && whole < count; ++j) buffer[j] = kMinusInfinity<T>;
  if (on_diagonal) buffer[row - first] = kMinusInfinity<T>;
  return buffer;
}

// What a pass looks for: bests, sums of hinges, bests among what is below the positive; of rows, of columns.
enum Goal : int { kBests = 1, kSums = 2, kBelow = 4, kOfRows = 8, kOfColumns = 16 };

// The best of the lanes, and of equal ones the lowest index.
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

// Comparisons leave a NaN out; here it takes its place as the best of its row and of its column, the first one stays.
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

// Takes rows [first_row, last_row), at most kRowsTogether, through the columns [first, first + count).
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

// Calls body(negatives, row, last_row, first, count) for every tile of columns and every group of rows in it.
template <typename T, typename Body>
inline void for_row_groups(const TripletBlock<T>& block, const Body& body) {
  constexpr int64_t kTile = kTileColumns<T>;
  alignas(64) T buffer[kRowsTogether][kTile];
  const T* negatives[kRowsTogether];
  for (int64_t first = 0; first < block.columns; first += kTile) {
    const int64_t count = block.columns - first < kTile ? block.columns - first : kTile;
    for (int64_t row = block.first_row; row < block.last_row; row += kRowsTogether) {
      const int64_t last_row = row + kRowsTogether < block.last_row ? row + kRowsTogether : block.last_row;
      for (int r = 0; r < kRowsTogether; ++r) {
        if (row + r < last_row) {
          negatives[r] = negatives_of(block, row + r, first, count, buffer[r]);
        } else {
          // Rows past the end hold no negatives.
          for (int64_t j = 0; j < padded_to_lanes(count); ++j) buffer[r][j] = kMinusInfinity<T>;
          negatives[r] = buffer[r];
        }
      }
      body(negatives, row, last_row, first, count);
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

// Takes rows [first_row, last_row), at most kRowsTogether, through the columns [first, first + count) and writes their
// gradient to `targets`, which are whole vectors but for the last one.
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

// Elements of 0 stay, whatever the factor; where a group of vectors has no others nothing is written.
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
