// Counting ranks on the CPU: one pass over the scores serves both directions.
//
// Several rows are processed together, so that the columns' own scores and counts are read and written once for all of
// them, and only the scores come from memory.
#pragma once

#include "cpu/kernels/retrieval.h"
#include "itm_fast/cpu/simd.h"

namespace itm_fast::ITM_FAST_ISA {

// -1 in the lanes with a score above the own one, or equal to it if equal scores count; else 0. A NaN score is above
// nothing; an own score of NaN is below everything except NaN.
template <typename T, bool kCountEqual>
ITM_FAST_INLINE Mask<T> above(Vector<T> score, Vector<T> own) {
  if constexpr (kCountEqual) {
    return ~(score < own) & (score == score);
  } else {
    return ~(score <= own) & (score == score);
  }
}

template <typename T, bool kCountEqual, int kRows>
inline void count_together(const RankRows<T>& rows, int64_t first_row) {
  const T* scores = rows.scores + first_row * rows.stride;
  Vector<T> row_own[kRows];
  Mask<T> row_count[kRows] = {};
  for (int r = 0; r < kRows; ++r) row_own[r] = splat(rows.row_own[first_row + r]);
  const int64_t whole = rows.columns / kLanes<T> * kLanes<T>;
  for (int64_t j = 0; j < whole; j += kLanes<T>) {
    const Vector<T> column_own = load(rows.column_own + j);
    Mask<T> column_count;
    __builtin_memcpy(&column_count, rows.column_count + j, sizeof(column_count));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector<T> score = load(scores + r * rows.stride + j);
      column_count -= above<T, kCountEqual>(score, column_own);
      row_count[r] -= above<T, kCountEqual>(score, row_own[r]);
    }
    __builtin_memcpy(rows.column_count + j, &column_count, sizeof(column_count));
  }
  for (int r = 0; r < kRows; ++r) {
    int64_t count = 0;
    for (int i = 0; i < kLanes<T>; ++i) count += row_count[r][i];
    for (int64_t j = whole; j < rows.columns; ++j) {
      const T score = scores[r * rows.stride + j];
      const auto is_above = [&](T own) { return score == score && (kCountEqual ? !(score < own) : !(score <= own)); };
      rows.column_count[j] += is_above(rows.column_own[j]);
      count += is_above(rows.row_own[first_row + r]);
    }
    rows.row_count[first_row + r] = count;
  }
}

template <typename T, bool kCountEqual>
inline void count_all(const RankRows<T>& rows) {
  constexpr int kTogether = 8;
  int64_t row = rows.first_row;
  for (; row + kTogether <= rows.last_row; row += kTogether) count_together<T, kCountEqual, kTogether>(rows, row);
  for (; row < rows.last_row; ++row) count_together<T, kCountEqual, 1>(rows, row);
}

template <typename T>
inline void count_rows(const RankRows<T>& rows) {
  rows.count_equal ? count_all<T, true>(rows) : count_all<T, false>(rows);
}

}  // namespace itm_fast::ITM_FAST_ISA
