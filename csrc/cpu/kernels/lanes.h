// Vector conventions shared by kernels and their callers, independent of the instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

namespace itm_fast {

// Integers as wide as the floating-point type, so that a vector holds equally many of both.
template <typename T>
using LaneInteger = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// The most lanes of any instruction set. Arrays that are read and written in whole vectors are padded to a multiple.
inline constexpr int64_t kMaxLanes = 16;

// static: kernel files of different instruction sets must not share a function.
static inline constexpr int64_t padded_to_lanes(int64_t size) { return (size + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

}  // namespace itm_fast
