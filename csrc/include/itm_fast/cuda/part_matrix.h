// float32 matrices as bfloat16 parts that add up to them, in global memory. Tensor cores take them without conversion.
#pragma once

#include "itm_fast/cuda/elements.h"

namespace itm_fast::cuda {

// Rows of parts are copied in pieces of 16 bytes.
constexpr int64_t padded_parts(int64_t count) { return (count + 7) / 8 * 8; }

// Row r has its elements of the first part, then those of the next: each part takes `stride` numbers of 16 bits, which
// is padded_parts of the columns. Three parts have the 24 bits of float32, two have 16.
template <int kParts>
struct PartMatrix {
  uint16_t* first;
  int stride;

  ITM_FAST_DEVICE void store(int row, int column, float value) const {
    uint16_t* part = first + row * kParts * stride + column;
    for (int i = 0; i < kParts; ++i) {
      part[i * stride] = bf16_bits(value);
      value -= bf16_value(part[i * stride]);
    }
  }
  ITM_FAST_DEVICE float load(int row, int column) const {
    const uint16_t* part = first + row * kParts * stride + column;
    float value = 0.0f;
    for (int i = kParts - 1; i >= 0; --i) value += bf16_value(part[i * stride]);
    return value;
  }
};

// An element of the rows of a PartMatrix, as a type of rows.
template <int kParts>
struct SplitElement {
  uint16_t bits;
};

}  // namespace itm_fast::cuda
