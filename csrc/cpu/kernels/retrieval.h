// The kernels of retrieval, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "cpu/kernels/lanes.h"

namespace itm_fast {

// Rows of a score matrix, and the own scores that they are compared with. NaN counts as lower than everything else.
template <typename T>
struct RankRows {
  const T* scores;  // row i at scores + i * stride
  int64_t stride;
  int64_t columns;
  int64_t first_row, last_row;
  bool count_equal;
  const T* row_own;              // (rows,)
  const T* column_own;           // (padded columns,)
  int64_t* row_count;            // (rows,), written: scores in the row above (or equal to) its own
  LaneInteger<T>* column_count;  // (padded columns,), added to: the same per column, for these rows
};

template <typename T>
struct RetrievalKernels {
  void (*count)(const RankRows<T>& rows);
};

#define ITM_FAST_DECLARE(isa)                              \
  namespace isa {                                          \
  extern const RetrievalKernels<float> kRetrievalFloat32;  \
  extern const RetrievalKernels<double> kRetrievalFloat64; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
