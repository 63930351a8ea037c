// Storage formats of rows on a GPU: float32, bfloat16 or float16. All arithmetic is in float32.
#pragma once

#include <cmath>

#include "itm_fast/bfloat16.h"
#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

struct Half {
  uint16_t bits;
};

ITM_FAST_DEVICE float widen(float value) { return value; }
ITM_FAST_DEVICE float widen(BFloat16 value) { return bf16_value(value.bits); }
ITM_FAST_DEVICE float widen(Half value) { return fp16_value(value.bits); }

// Rounds to nearest, ties to even.
ITM_FAST_DEVICE void narrow(float value, float& stored) { stored = value; }
ITM_FAST_DEVICE void narrow(float value, BFloat16& stored) { stored.bits = bf16_bits(value); }
ITM_FAST_DEVICE void narrow(float value, Half& stored) { stored.bits = fp16_bits(value); }

// Calls use(i, load(i)) for i from `first` to last - 1, in this order. A few elements are loaded before the first of
// them is used, so that their latencies overlap: the compiler cannot move a load before what `use` writes.
template <typename Load, typename Use>
ITM_FAST_DEVICE void load_ahead(int first, int last, const Load& load, const Use& use) {
  constexpr int kAhead = 4;
  for (; first < last; first += kAhead) {
    decltype(load(0)) loaded[kAhead];
    ITM_FAST_UNROLLED
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < last) loaded[i] = load(first + i);
    }
    ITM_FAST_UNROLLED
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < last) use(first + i, loaded[i]);
    }
  }
}

// The sum of the numbers of a warp's lanes, for each of them.
ITM_FAST_DEVICE float add_lanes(float value) {
  for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

// The norm of a row, for a warp.
template <typename S>
ITM_FAST_DEVICE float norm_of_row(const S* row, int64_t dim) {
  float square = 0.0f;
  for (int64_t d = lane(); d < dim; d += 32) {
    const float x = widen(row[d]);
    square += x * x;
  }
  return sqrtf(add_lanes(square));
}

}  // namespace itm_fast::cuda
