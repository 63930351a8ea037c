// Shared by the passes over a score matrix on the CPU: tiles of columns, and the values that replace scores in them.
//
// One pass over the scores serves both directions. A block works on tiles of columns and processes several rows of a
// tile together, so that the data of the columns is read and written once for all of them. Pairs that are not negatives
// are -inf; a tile of a row is copied only if it contains such a pair.
#pragma once

#include <type_traits>

#include "cpu/kernels/triplet_loss.h"
#include "itm_fast/cpu/simd.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename T>
inline constexpr int64_t kTileColumns = 4096 / sizeof(T);

// Rows processed together in a tile; each keeps a best and its lane in registers.
#if defined(__AVX512F__)
inline constexpr int kRowsTogether = 8;
#else
inline constexpr int kRowsTogether = 4;
#endif

template <typename T>
inline constexpr T kMinusInfinity = -__builtin_huge_valf();

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

// Columns [first, first + count) of a row, up to a whole vector, with -inf for pairs that are not negatives: the scores
// themselves if nothing changes, else a changed copy in `buffer`.
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

// What a pass computes: bests, sums of hinges, bests below the positive; of rows, of columns.
enum Goal : int { kBests = 1, kSums = 2, kBelow = 4, kOfRows = 8, kOfColumns = 16 };

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

}  // namespace itm_fast::ITM_FAST_ISA
