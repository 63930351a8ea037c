// Vectors of one instruction set.
//
// A kernel file is compiled once per instruction set, with ITM_FAST_ISA naming the namespace and the compiler's flags
// choosing the width. Everything lives in that namespace, so the linker never mixes code of two instruction sets. The
// compilers' vector extensions give the arithmetic; no intrinsics, so the same source serves x86-64 and arm64.
#pragma once

#include <cmath>
#include <cstdint>

#ifndef ITM_FAST_ISA
#error "ITM_FAST_ISA must name the instruction set's namespace"
#endif

namespace itm_fast::ITM_FAST_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kMicroRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kMicroRows = 6;  // 12 accumulators of 16 registers
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kMicroRows = 6;
#endif

template <typename T>
struct VectorOf;

template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vector = typename VectorOf<T>::type;
template <typename T>
using Mask = typename VectorOf<T>::mask;

template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

#define ITM_FAST_INLINE inline __attribute__((always_inline))

template <typename T>
ITM_FAST_INLINE Vector<T> load(const T* source) {
  Vector<T> value;
  __builtin_memcpy(&value, source, sizeof(value));
  return value;
}

template <typename T>
ITM_FAST_INLINE void store(T* target, Vector<T> value) {
  __builtin_memcpy(target, &value, sizeof(value));
}

template <typename T>
ITM_FAST_INLINE Vector<T> splat(T value) {
  return value - Vector<T>{};
}

// Lanes 0, 1, 2, ... below `count`.
template <typename T>
ITM_FAST_INLINE Mask<T> first_lanes(int64_t count) {
  Mask<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < (Mask<T>{} + static_cast<decltype(lane[0] + 0)>(count < kLanes<T> ? count : kLanes<T>));
}

template <typename T>
ITM_FAST_INLINE Vector<T> select(Mask<T> mask, Vector<T> yes, Vector<T> no) {
  return mask ? yes : no;
}

// A NaN in `a` is kept, one in `b` is not.
template <typename T>
ITM_FAST_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
  return a < b ? b : a;
}

template <typename T>
ITM_FAST_INLINE T sum_lanes(Vector<T> value) {
  // Halving keeps the order of the additions the same for every call of one instruction set.
  T lanes[kLanes<T>];
  store(lanes, value);
#pragma GCC unroll 8
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <typename T>
ITM_FAST_INLINE T max_lanes(Vector<T> value) {
  T best = value[0];
  for (int i = 1; i < kLanes<T>; ++i) best = best < value[i] ? value[i] : best;
  return best;
}

// exp within 2 units in the last place for x in [-87, 88]; 0 below, e^88 above, NaN for NaN.
ITM_FAST_INLINE Vector<float> exp_vector(Vector<float> x) {
  const Vector<float> lowest = splat(-87.0f);
  const Vector<float> highest = splat(88.0f);
  Vector<float> bounded = x < lowest ? lowest : x;
  bounded = bounded > highest ? highest : bounded;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
  const Vector<float> shifted = bounded * 1.44269504f + 12582912.0f;
  const Vector<float> n = shifted - 12582912.0f;
  Vector<float> r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Mask<float> bits = (Mask<float>)(shifted) << 23;
  const Vector<float> scaled = (Vector<float>)((Mask<float>)p + bits);
  const Vector<float> result = x < lowest ? Vector<float>{} : scaled;
  return x == x ? result : x;
}

ITM_FAST_INLINE Vector<double> exp_vector(Vector<double> x) {
  Vector<double> result{};
  for (int i = 0; i < kLanes<double>; ++i) result[i] = std::exp(x[i]);
  return result;
}

}  // namespace itm_fast::ITM_FAST_ISA
