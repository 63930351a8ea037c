// Vectors of one instruction set.
//
// A kernel file is compiled once per instruction set: ITM_FAST_ISA names the namespace, and the compiler flags choose
// the width. Everything is in that namespace, so the linker never mixes code of two instruction sets. The compilers'
// vector extensions provide the arithmetic, so the same source serves x86-64 and arm64. Intrinsics are only used for
// bfloat16 operations of an instruction set.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <utility>

#include "itm_fast/bfloat16.h"

#ifndef ITM_FAST_ISA
#error "ITM_FAST_ISA must name the instruction set's namespace"
#endif

namespace itm_fast::ITM_FAST_ISA {

#if defined(__AVX512F__) || defined(ITM_FAST_AMX)
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

typedef uint16_t HalfLanes __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t FloatBits __attribute__((vector_size(kVectorBytes)));

ITM_FAST_INLINE float widen(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

// Values of the compute type are not converted.
template <typename T>
ITM_FAST_INLINE T widen(T value) {
  return value;
}

ITM_FAST_INLINE Vector<float> load(const BFloat16* source) {
  HalfLanes halves;
  __builtin_memcpy(&halves, source, sizeof(halves));
  return (Vector<float>)(__builtin_convertvector(halves, FloatBits) << 16);
}

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
ITM_FAST_INLINE void store(BFloat16* target, Vector<float> value) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
  __builtin_memcpy(target, &narrow, sizeof(narrow));
#else
  const FloatBits bits = (FloatBits)value;
  const FloatBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const HalfLanes halves = __builtin_convertvector(
      (FloatBits)(value == value ? (Mask<float>)rounded : (Mask<float>)(bits >> 16 | 64)), HalfLanes);
  __builtin_memcpy(target, &halves, sizeof(halves));
#endif
}

ITM_FAST_INLINE BFloat16 narrow(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(value == value ? rounded : bits >> 16 | 64)};
}

// Converts values from one storage type to another.
template <typename From, typename To>
ITM_FAST_INLINE void convert(const From* source, int64_t count, To* target) {
  int64_t i = 0;
  for (; i + kLanes<float> <= count; i += kLanes<float>) store(target + i, load(source + i));
  for (; i < count; ++i) {
    if constexpr (sizeof(From) < sizeof(To)) {
      target[i] = widen(source[i]);
    } else {
      target[i] = narrow(source[i]);
    }
  }
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

// Keeps a NaN in `a`, but not one in `b`.
template <typename T>
ITM_FAST_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
  return a < b ? b : a;
}

template <typename T>
ITM_FAST_INLINE T sum_lanes(Vector<T> value) {
  // Halving gives the same order of additions in every call of one instruction set.
  T lanes[kLanes<T>];
  store(lanes, value);
#pragma GCC unroll 8
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Takes the first (Half 0) or second (Half 1) half of each block of `Block` lanes, of `a` and then of `b`.
template <typename T, int Block, int Half, size_t... Lane>
ITM_FAST_INLINE Vector<T> take_halves(Vector<T> a, Vector<T> b, std::index_sequence<Lane...>) {
  constexpr auto source = [](int lane) { return lane / (Block / 2) * Block + Half * (Block / 2) + lane % (Block / 2); };
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, source(Lane)...);
#else
  Vector<T> result;
  for (int lane : {static_cast<int>(Lane)...}) {
    result[lane] = source(lane) < kLanes<T> ? a[source(lane)] : b[source(lane) - kLanes<T>];
  }
  return result;
#endif
}

// Lane i of the result is the sum of the lanes of rows[i], added up in the order of sum_lanes.
template <typename T, int Block = kLanes<T>>
ITM_FAST_INLINE Vector<T> sum_rows(Vector<T> (&rows)[kLanes<T>]) {
  constexpr auto kAll = std::make_index_sequence<kLanes<T>>{};
  constexpr int kSums = Block / 2;  // remaining vectors
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) {
    const Vector<T> a = rows[2 * i], b = rows[2 * i + 1];
    rows[i] = take_halves<T, Block, 0>(a, b, kAll) + take_halves<T, Block, 1>(a, b, kAll);
  }
  if constexpr (kSums == 1) {
    return rows[0];
  } else {
    return sum_rows<T, kSums>(rows);
  }
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
  const FloatBits bits = (FloatBits)(shifted) << 23;
  const Vector<float> scaled = (Vector<float>)((FloatBits)p + bits);
  const Vector<float> result = x < lowest ? Vector<float>{} : scaled;
  return x == x ? result : x;
}

ITM_FAST_INLINE Vector<double> exp_vector(Vector<double> x) {
  Vector<double> result{};
  for (int i = 0; i < kLanes<double>; ++i) result[i] = std::exp(x[i]);
  return result;
}

// tanh within 2 units in the last place, NaN for NaN. Near zero it is an odd polynomial, a least-squares fit.
ITM_FAST_INLINE Vector<float> tanh_vector(Vector<float> x) {
  const Vector<float> size = x < Vector<float>{} ? -x : x, square = x * x;
  Vector<float> p = splat(-6.276390147e-03f);
  p = p * square + 2.111621603e-02f;
  p = p * square - 5.387513875e-02f;
  p = p * square + 1.333292401e-01f;
  p = p * square - 3.333333043e-01f;
  const Vector<float> near_zero = x + x * square * p;
  const Vector<float> far = 1.0f - 2.0f / (exp_vector(size + size) + 1.0f);
  const Vector<float> signed_far = x < Vector<float>{} ? -far : far;
  return size < splat(0.6f) ? near_zero : signed_far;
}

ITM_FAST_INLINE Vector<double> tanh_vector(Vector<double> x) {
  Vector<double> result{};
  for (int i = 0; i < kLanes<double>; ++i) result[i] = std::tanh(x[i]);
  return result;
}

}  // namespace itm_fast::ITM_FAST_ISA
