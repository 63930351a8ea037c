// The 16-bit floating point type with float32's range: storage and packed operands, never arithmetic.
#pragma once

#include <cstdint>

namespace itm_fast {

struct BFloat16 {
  uint16_t bits;
};

// Two neighbours along the shared dimension of a product, which instructions for bfloat16 multiply and add at once. The
// one with the lower index stands in the lower half.
struct BFloat16Pair {
  uint32_t bits;
};

}  // namespace itm_fast
