// The functions of machine.h on the CPU, for the fibers of shim/block.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "itm_fast/cuda/fragments.h"
#include "shim/block.h"
#include "shim/shared_memory.h"

#define ITM_FAST_DEVICE inline
#define ITM_FAST_DEVICE_APART inline
#define ITM_FAST_UNROLLED
#define ITM_FAST_ROLLED
#define ITM_FAST_SHARED(type, name, size)                                \
  const ::itm_fast::cuda::SharedArray<type> name {                       \
    ::itm_fast::shim::shared_memory(#name, __LINE__, sizeof(type), size) \
  }
#define ITM_FAST_DYNAMIC_SHARED(type, name, offset, size)                          \
  const ::itm_fast::cuda::SharedArray<type> name {                                 \
    ::itm_fast::shim::dynamic_shared_memory(#name, (offset), sizeof(type), (size)) \
  }

namespace itm_fast::cuda {

// Reference to an element: reads and writes go through the checks.
template <typename T>
class SharedReference {
 public:
  SharedReference(shim::SharedMemory& memory, int64_t index) : memory_(memory), index_(index) {}
  operator T() const {
    T value;
    memory_.read(index_, &value);
    return value;
  }
  const SharedReference& operator=(T value) const {
    memory_.write(index_, &value);
    return *this;
  }
  const SharedReference& operator=(const SharedReference& other) const { return *this = static_cast<T>(other); }
  const SharedReference& operator+=(T value) const { return *this = static_cast<T>(*this) + value; }

 private:
  shim::SharedMemory& memory_;
  const int64_t index_;
};

template <typename T>
struct SharedArray {
  shim::SharedMemory& memory;
  SharedReference<T> operator[](int64_t index) const { return {memory, index}; }
};

inline int thread_index() { return shim::thread().index; }
inline int block_threads() { return shim::block_size(); }
inline int64_t block_index() { return shim::block(); }
inline int64_t grid_blocks() { return shim::grid_size(); }
inline int lane() { return thread_index() % shim::kWarpSize; }
inline int warp() { return thread_index() / shim::kWarpSize; }

inline int opaque(int value) { return value; }

inline void barrier() { shim::wait_for_block(); }
inline void warp_sync() {
  shim::wait_for_warp(shim::Operation::warp_sync);
  ++shim::thread().warp_syncs;
}
inline void memory_fence() {}  // Other blocks see every write at once.
inline void grid_barrier(int32_t* arrived, int32_t round) {
  barrier();
  if (thread_index() == 0) {
    ++*arrived;
    shim::wait_for_count(arrived, round * static_cast<int32_t>(grid_blocks()));
  }
  barrier();
}

template <typename T>
inline T shuffle(T value, int source_lane) {
  const unsigned char* slots = shim::exchange(shim::Operation::shuffle, &value, sizeof(T));
  std::memcpy(&value, slots + source_lane % shim::kWarpSize * shim::kSlotSize, sizeof(T));
  return value;
}
template <typename T>
inline T shuffle_xor(T value, int lane_mask) {
  return shuffle(value, lane() ^ lane_mask);
}
inline uint32_t ballot(bool value) {
  const unsigned char* slots = shim::exchange(shim::Operation::vote, &value, 1);
  uint32_t bits = 0;
  for (int i = 0; i < shim::kWarpSize; ++i) bits |= static_cast<uint32_t>(slots[i * shim::kSlotSize]) << i;
  return bits;
}
inline bool vote_any(bool value) { return ballot(value) != 0; }
inline bool vote_all(bool value) { return ballot(value) == 0xffffffffu; }
inline int count_bits(uint32_t bits) { return std::popcount(bits); }
template <typename T>
inline T exponential(T x) {
  return std::exp(x);
}
inline float logarithm_of_one_plus(float x) { return std::log1p(x); }

template <typename T>
inline T atomic_add(T* target, T value) {
  const T before = *target;
  *target = before + value;
  return before;
}
inline int32_t atomic_add(SharedArray<int32_t> target, int64_t index, int32_t value) {
  return atomic_add(static_cast<int32_t*>(target.memory.update_atomically(index)), value);
}
inline uint64_t atomic_max(uint64_t* target, uint64_t value) {
  const uint64_t before = *target;
  if (value > before) *target = value;
  return before;
}

template <typename T>
inline T load_coherent(const T* source) {
  return *source;
}
inline void load_four(float (&values)[4], const float* source) {
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) shim::fail("load_four: the address is not aligned to 16 bytes");
  std::memcpy(values, source, sizeof(values));
}

template <typename T>
inline void copy_async(SharedArray<T> target, int64_t index, const T* source, int count) {
  const int64_t length = 16 / static_cast<int64_t>(sizeof(T));
  target.memory.begin_copy(index, length, count, source);
  shim::thread().open_copies.push_back({&target.memory, index, count, length, source});
}
inline void commit_copies() {
  shim::Thread& thread = shim::thread();
  thread.groups.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}
template <int kStillUnderWay>
inline void wait_copies() {
  auto& groups = shim::thread().groups;
  while (groups.size() > kStillUnderWay) {
    for (const shim::Copy& copy : groups.front()) copy.target->finish_copy(copy);
    groups.erase(groups.begin());
  }
}

template <bool kTransposed>
inline void load_matrices(uint32_t (&parts)[4], SharedArray<uint16_t> source, int64_t index) {
  if (source.memory.byte_offset(index) % 16 != 0) {
    shim::fail("shared array '" + source.memory.name() + "': load_matrix of index " + std::to_string(index) +
               ", expected rows on 16-byte boundaries");
  }
  const unsigned char* slots = shim::exchange(shim::Operation::load_matrix, &index, sizeof(index));
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint32_t part = 0;
    for (int half = 0; half < 2; ++half) {
      const Place place = kTransposed ? load_matrix_transposed_place(lane(), half) : load_matrix_place(lane(), half);
      int64_t row;
      std::memcpy(&row, slots + load_matrix_address_lane(matrix, place.row) * shim::kSlotSize, sizeof(row));
      part |= static_cast<uint32_t>(static_cast<uint16_t>(source[row + place.column])) << 16 * half;
    }
    parts[matrix] = part;
  }
}
inline void load_matrix(uint32_t (&parts)[4], SharedArray<uint16_t> source, int64_t index) {
  load_matrices<false>(parts, source, index);
}
inline void load_matrix_transposed(uint32_t (&parts)[4], SharedArray<uint16_t> source, int64_t index) {
  load_matrices<true>(parts, source, index);
}

inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
inline float fp16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 31) value = fraction == 0 ? HUGE_VALF : std::bit_cast<float>(0x7fc00000u);
  if (exponent > 0 && exponent < 31) value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 != 0 ? -value : value;
}

// Rounds to nearest, ties to even; NaN becomes the one that cvt produces.
inline uint16_t bf16_bits(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t bf16_pair(float low, float high) {
  return bf16_bits(low) | static_cast<uint32_t>(bf16_bits(high)) << 16;
}
inline uint16_t fp16_bits(float value) {
  if (value != value) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size == 0.0f) return sign;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(size, &exponent);
  // The unit in the last place; it is 2^-24 for numbers below 2^-14.
  const int unit = (exponent > -13 ? exponent : -13) - 11;
  const int count = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));  // Ties to even, the default mode.
  return sign | static_cast<uint16_t>((unit + 24) * 1024 + count);
}

// For an element of a 16 x 16 or 16 x 8 operand: the lane, register and register half that hold it, as an index into
// the slots of an exchange.
template <int kColumns>
struct FragmentBytes {
  constexpr FragmentBytes(Place (*place_of)(int, int), int elements, int first_register) {
    for (int lane = 0; lane < shim::kWarpSize; ++lane) {
      for (int i = 0; i < elements; ++i) {
        const Place place = place_of(lane, i);
        at[place.row][place.column] = lane * shim::kSlotSize + first_register * 4 + i * 2;
      }
    }
  }
  int at[16][kColumns] = {};
};
// Not in a function: libraries that are loaded together would share its static variables.
constexpr FragmentBytes<16> kLeftBytes(mma_a_place, 8, 0);
constexpr FragmentBytes<8> kRightBytes(mma_b_place, 4, 4);

#if defined(ITM_FAST_SHIM_TRUNCATES)
// As tensor cores add: terms are aligned to the largest one, eight products at a time, and the digits below the last
// place are cut off, of the terms and of the sum.
inline float add_products(float sum, const float* products) {
  for (int first = 0; first < 16; first += 8) {
    float plain = sum, largest = std::fabs(sum);
    for (int k = first; k < first + 8; ++k) {
      plain += products[k];
      largest = std::fmax(largest, std::fabs(products[k]));
    }
    if (!std::isfinite(plain) || largest == 0.0f) {
      sum = plain;
      continue;
    }
    int exponent = 0, size = 0;
    std::frexp(largest, &exponent);
    double total = std::trunc(std::ldexp(static_cast<double>(sum), 24 - exponent));
    for (int k = first; k < first + 8; ++k)
      total += std::trunc(std::ldexp(static_cast<double>(products[k]), 24 - exponent));
    std::frexp(total, &size);
    const int dropped = size > 24 ? size - 24 : 0;
    sum = static_cast<float>(std::ldexp(std::trunc(std::ldexp(total, -dropped)), dropped + exponent - 24));
  }
  return sum;
}
#else
// In float32, in ascending order of the shared dimension.
inline float add_products(float sum, const float* products) {
  for (int k = 0; k < 16; ++k) sum += products[k];
  return sum;
}
#endif

inline void multiply_fragments(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                               float (*value_of)(uint16_t)) {
  uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const unsigned char* slots = shim::exchange(shim::Operation::mma, own, sizeof(own));
  const auto value = [&](int at) {
    uint16_t bits;
    std::memcpy(&bits, slots + at, sizeof(bits));
    return value_of(bits);
  };
  for (int i = 0; i < 4; ++i) {
    const Place place = mma_sum_place(lane(), i);
    float products[16];
    for (int k = 0; k < 16; ++k) {
      products[k] = value(kLeftBytes.at[place.row][k]) * value(kRightBytes.at[k][place.column]);
    }
    sums[i] = add_products(sums[i], products);
  }
}
inline void mma_bf16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_fragments(sums, a, b, bf16_value);
}
inline void mma_fp16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_fragments(sums, a, b, fp16_value);
}

}  // namespace itm_fast::cuda
