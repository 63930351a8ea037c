// One-warp kernels that each call one wrapper of machine.h on the input of a test. They compare the GPU body of every
// wrapper with its CPU body, bit for bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "itm_fast/cuda/fragments.h"
#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

// The tests select a wrapper by these numbers. `in` and `out` are 32-bit words; [lane][n] means that lane l has words
// l n to l n + n - 1.
enum Wrapper : int {
  kMmaBf16,               // in: a[4], b[2] and sums[4] as [lane][10]; out: sums as [lane][4]
  kMmaFp16,               // the same
  kLoadMatrix,            // in: 32 rows of eight 16-bit elements, then [lane] the row that it addresses; out: [lane][4]
  kLoadMatrixTransposed,  // the same
  kCopyHalves,            // in: [lane][8], two parts of 16 bytes, then [lane][2] elements to copy of each;
  kCopyWords,             //   out: [lane][8]; halves: 16-bit elements, words: 32-bit ones
  kShuffle,               // in: [lane] the value, then [lane] the source lane; out: [lane]
  kShuffleXor,            // in: [lane] the value; out: [lane][5], exchanged by 1, 2, 4, 8, 16
  kVotes,                 // in: [lane] 0 or 1; out: [lane][3], any, all and the ballot
  kCountBits,             // in: [lane]; out: [lane]
  kAtomics,               // in: [lane][2]; out: sums as int32 (global, shared), as int64 (two words), maximum as uint64
  kLoadCoherent,          // in: [lane]; out: [lane]
  kLoadFour,              // in: [lane][4]; out: [lane][4]
  kWiden,                 // in: [lane][16], 16 bits each; out: [lane][16][2], as bfloat16 and as float16 in float32
  kNarrow,  // in: [lane][16][2] float32; out: [lane][16][3], both as bfloat16, the same by bf16_pair, both as float16
  kWrappers
};

ITM_FAST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <bool kHalf>
ITM_FAST_DEVICE void call_mma(const uint32_t* in, uint32_t* out) {
  uint32_t a[4], b[2];
  float sums[4];
  in += 10 * lane();
  for (int i = 0; i < 4; ++i) a[i] = in[i];
  for (int i = 0; i < 2; ++i) b[i] = in[4 + i];
  for (int i = 0; i < 4; ++i) memcpy(&sums[i], in + 6 + i, sizeof(float));
  if (kHalf) {
    mma_fp16(sums, a, b);
  } else {
    mma_bf16(sums, a, b);
  }
  for (int i = 0; i < 4; ++i) out[4 * lane() + i] = bits_of(sums[i]);
}

template <bool kTransposed>
ITM_FAST_DEVICE void call_load_matrix(const uint32_t* in, uint32_t* out) {
  constexpr int kStride = 24;  // Separate rows on 16-byte boundaries.
  ITM_FAST_SHARED(uint16_t, rows, 32 * kStride);
  for (int i = 0; i < 8; ++i) {
    rows[lane() * kStride + i] = static_cast<uint16_t>(in[4 * lane() + i / 2] >> 16 * (i % 2));
  }
  barrier();
  uint32_t parts[4];
  const int64_t row = static_cast<int64_t>(in[128 + lane()]) * kStride;
  if (kTransposed) {
    load_matrix_transposed(parts, rows, row);
  } else {
    load_matrix(parts, rows, row);
  }
  for (int i = 0; i < 4; ++i) out[4 * lane() + i] = parts[i];
}

// The first part must be complete while the second copy is still pending.
template <typename T>
ITM_FAST_DEVICE void call_copy(const uint32_t* in, uint32_t* out) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(T)), kParts = 4 / static_cast<int>(sizeof(T));
  ITM_FAST_SHARED(T, parts, 2 * 32 * kCount);
  const T* source = reinterpret_cast<const T*>(in + 8 * lane());
  for (int part = 0; part < 2; ++part) {
    const int count = static_cast<int>(in[8 * 32 + 2 * lane() + part]);
    copy_async(parts, (part * 32 + lane()) * kCount, source + part * kCount, count);
    commit_copies();
  }
  for (int part = 0; part < 2; ++part) {
    if (part == 0) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    barrier();
    // The words that the neighbouring lane copied.
    const int other = (lane() + 1) % 32;
    for (int i = 0; i < 4; ++i) {
      uint32_t word = 0;
      for (int j = 0; j < kParts; ++j) {
        const T element = parts[(part * 32 + other) * kCount + i * kParts + j];
        word |= static_cast<uint32_t>(element) << (8 * static_cast<int>(sizeof(T)) * j) % 32;
      }
      out[8 * other + 4 * part + i] = word;
    }
  }
}

ITM_FAST_DEVICE void call_atomics(const uint32_t* in, uint32_t* out) {
  ITM_FAST_SHARED(int32_t, sum, 1);
  if (lane() == 0) sum[0] = 0;
  barrier();
  const uint32_t low = in[2 * lane()], high = in[2 * lane() + 1];
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  atomic_add(reinterpret_cast<int32_t*>(out), static_cast<int32_t>(low));
  atomic_add(sum, 0, static_cast<int32_t>(low));
  atomic_add(reinterpret_cast<int64_t*>(out + 2), static_cast<int64_t>(both));
  atomic_max(reinterpret_cast<uint64_t*>(out + 4), both);
  barrier();
  if (lane() == 0) out[1] = static_cast<uint32_t>(static_cast<int32_t>(sum[0]));
}

inline constexpr int kConverted = 16;  // values per lane

ITM_FAST_DEVICE void call_widen(const uint32_t* in, uint32_t* out) {
  for (int i = lane() * kConverted; i < (lane() + 1) * kConverted; ++i) {
    out[2 * i] = bits_of(bf16_value(static_cast<uint16_t>(in[i])));
    out[2 * i + 1] = bits_of(fp16_value(static_cast<uint16_t>(in[i])));
  }
}

ITM_FAST_DEVICE void call_narrow(const uint32_t* in, uint32_t* out) {
  for (int i = lane() * kConverted; i < (lane() + 1) * kConverted; ++i) {
    float low, high;
    memcpy(&low, in + 2 * i, sizeof(low));
    memcpy(&high, in + 2 * i + 1, sizeof(high));
    out[3 * i] = bf16_bits(low) | static_cast<uint32_t>(bf16_bits(high)) << 16;
    out[3 * i + 1] = bf16_pair(low, high);
    out[3 * i + 2] = fp16_bits(low) | static_cast<uint32_t>(fp16_bits(high)) << 16;
  }
}

template <int kWrapper>
ITM_FAST_DEVICE void call_wrapper(const uint32_t* in, uint32_t* out) {
  if constexpr (kWrapper == kMmaBf16 || kWrapper == kMmaFp16) call_mma<kWrapper == kMmaFp16>(in, out);
  if constexpr (kWrapper == kLoadMatrix || kWrapper == kLoadMatrixTransposed) {
    call_load_matrix<kWrapper == kLoadMatrixTransposed>(in, out);
  }
  if constexpr (kWrapper == kCopyHalves) call_copy<uint16_t>(in, out);
  if constexpr (kWrapper == kCopyWords) call_copy<uint32_t>(in, out);
  if constexpr (kWrapper == kShuffle) out[lane()] = shuffle(in[lane()], static_cast<int>(in[32 + lane()]));
  if constexpr (kWrapper == kShuffleXor) {
    for (int i = 0; i < 5; ++i) out[5 * lane() + i] = shuffle_xor(in[lane()], 1 << i);
  }
  if constexpr (kWrapper == kVotes) {
    const bool vote = in[lane()] != 0;
    out[3 * lane()] = vote_any(vote);
    out[3 * lane() + 1] = vote_all(vote);
    out[3 * lane() + 2] = ballot(vote);
  }
  if constexpr (kWrapper == kCountBits) {
    out[lane()] = static_cast<uint32_t>(count_bits(static_cast<uint32_t>(opaque(static_cast<int>(in[lane()])))));
  }
  if constexpr (kWrapper == kAtomics) call_atomics(in, out);
  if constexpr (kWrapper == kLoadCoherent) {
    memory_fence();
    out[lane()] = load_coherent(in + lane());
  }
  if constexpr (kWrapper == kLoadFour) {
    float values[4];
    load_four(values, reinterpret_cast<const float*>(in) + 4 * lane());
    __builtin_memcpy(out + 4 * lane(), values, sizeof(values));
  }
  if constexpr (kWrapper == kWiden) call_widen(in, out);
  if constexpr (kWrapper == kNarrow) call_narrow(in, out);
}

// Calls call(std::integral_constant<int, w>) for the wrapper with that number.
template <int kWrapper = 0, typename Call>
void with_wrapper(int64_t number, const Call& call) {
  if (number == kWrapper) call(std::integral_constant<int, kWrapper>());
  if constexpr (kWrapper + 1 < kWrappers) with_wrapper<kWrapper + 1>(number, call);
}

}  // namespace itm_fast::cuda
