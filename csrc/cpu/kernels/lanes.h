// What kernels and their callers agree on about vectors, whatever the instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

namespace itm_fast {

// Integers as wide as the floating point type, so that both fill a vector alike.
template <typename T>
using LaneInteger = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// The most lanes of any instruction set. Arrays that are read and written in whole vectors have a multiple of it.
inline constexpr int64_t kMaxLanes = 16;

// static: kernel files of several instruction sets must not share a function.
static inline constexpr int64_t padded_to_lanes(int64_t size) { return (size + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

}  // namespace itm_fast
