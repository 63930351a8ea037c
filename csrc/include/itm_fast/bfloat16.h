// The 16-bit floating-point type with float32's range: for storage and packed operands, not for arithmetic.
#pragma once

#include <cstdint>

namespace itm_fast {

struct BFloat16 {
  uint16_t bits;
};

// Two adjacent numbers along the shared dimension of a product, which bfloat16 instructions multiply and add at once.
// The one with the lower index is in the lower half.
struct BFloat16Pair {
  uint32_t bits;
};

}  // namespace itm_fast
