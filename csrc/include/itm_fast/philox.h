// Counter-based dropout: an element's mask depends only on the seed and the element's position.
#pragma once

#include <cstdint>

namespace itm_fast {

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). A word is a 64-bit unsigned
// integer that holds 32 bits, or a vector of them; the words of the counter become the result. Constexpr, so that GPU
// kernels can call it.
template <typename Word>
__attribute__((always_inline)) constexpr void philox4x32(Word (&words)[4], uint32_t key0, uint32_t key1) {
  constexpr uint64_t kLowHalf = 0xffffffff;
  for (int round = 0; round < 10; ++round) {
    const Word first = words[0] * uint64_t{0xd2511f53}, second = words[2] * uint64_t{0xcd9e8d57};
    words[0] = (second >> 32) ^ words[1] ^ uint64_t { key0 };
    words[1] = second & kLowHalf;
    words[2] = (first >> 32) ^ words[3] ^ uint64_t { key1 };
    words[3] = first & kLowHalf;
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
}

// The channels to drop, and the scale of the rest. Channel i at a query row, a context set and a stream takes word i %
// 4 of the counter (row, context, stream, i / 4); a word below the threshold drops the channel.
struct CounterDropout {
  double probability;
  uint64_t threshold;  // floor(probability * 2^32)
  uint32_t key[2];     // the lower and the upper half of the seed

  constexpr void set_key(int64_t seed) {
    key[0] = static_cast<uint32_t>(static_cast<uint64_t>(seed));
    key[1] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  }
};

}  // namespace itm_fast
