// The kernels of triplet_loss, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "cpu/kernels/lanes.h"
#include "itm_fast/boosting_loss.h"

namespace itm_fast {

// The value of a pair with score s: s itself or, with the scores a of an anchor branch, the gap s - a plus a soft
// margin. That margin depends on the anchor's own a minus a (one of the two arrays is given), or on a.
template <typename T>
struct PairKey {
  const T* anchor_scores;  // (rows, columns); null: s itself
  Margin<T> margin;        // used if it is soft
  const T* row_own;        // (rows,)
  const T* column_own;     // (padded columns,)
};

// A block of rows of the score matrix, and the values that an anchor's negatives are compared with.
template <typename T>
struct TripletBlock {
  const T* scores;           // (rows, columns)
  const uint8_t* positives;  // (rows, columns) or null
  int64_t columns;
  int64_t first_row, last_row;
  bool exclude_diagonal;
  T margin;
  const T* row_positive;     // (rows,), null if rows are not anchors
  const T* column_positive;  // (padded columns,), null if columns are not anchors
  PairKey<T> key;
};

// The best negative with its index, and the sum of the hinges; each pair of pointers may be null. Without a negative
// the best is -inf and its index is meaningless. NaN counts as better than every number.
template <typename T>
struct TripletScan {
  T* row_best;  // (rows,)
  int64_t* row_index;
  double* row_sum;
  T* column_best;                // (padded columns,), of this block's rows only
  LaneInteger<T>* column_index;  // counted from first_row
  T* column_sum;
  bool semi_hard;  // only negatives below the positive are candidates of the best
};

// The gradient of sums of hinges: what each active hinge of an anchor adds at its negative, and the number of active
// hinges. Also computes the sums, as a scan does, if requested.
template <typename T>
struct TripletSpread {
  const T* row_weight;           // (rows,)
  const T* column_weight;        // (padded columns,)
  int64_t* row_count;            // (rows,)
  LaneInteger<T>* column_count;  // (padded columns,), of this block's rows only
  double* row_sum;               // (rows,) or null
  T* column_sum;                 // (padded columns,), of this block's rows only, or null
  T* gradient;                   // (rows, columns), written
  bool accumulates;              // adds to the gradient instead of overwriting it
};

template <typename T>
struct TripletKernels {
  void (*scan)(const TripletBlock<T>& block, const TripletScan<T>& scan);
  void (*spread)(const TripletBlock<T>& block, const TripletSpread<T>& spread);
  void (*scale)(T* values, int64_t count, T factor);
};

#define ITM_FAST_DECLARE(isa)                          \
  namespace isa {                                      \
  extern const TripletKernels<float> kTripletFloat32;  \
  extern const TripletKernels<double> kTripletFloat64; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
