// The product in the shim, the fragment table, and small kernels that break the rules. Functions that run a kernel
// return an error message or an empty string.
#include "product.h"

#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/elements.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

template <bool kTransposed>
std::string run(const ProductParameters& p, bool half, uint64_t seed) {
  const int64_t blocks =
      (p.rows + kProductRows - 1) / kProductRows * ((p.columns + kProductColumns - 1) / kProductColumns);
  return shim::launch(blocks, 32 * kProductWarps, seed,
                      [&] { half ? product<kTransposed, true>(p) : product<kTransposed, false>(p); });
}

}  // namespace

extern "C" const char* product(int64_t seed, int64_t transposed, int64_t half, int64_t rows, int64_t columns,
                               int64_t depth, const uint16_t* left, const uint16_t* right, float* out) {
  const Exact<uint16_t> first(left, rows * depth), second(right, columns * depth);
  Exact<float> results(out, rows * columns);
  const ProductParameters p{first.memory, second.memory, results.memory, rows, columns, depth};
  const std::string problem = transposed != 0 ? run<true>(p, half != 0, seed) : run<false>(p, half != 0, seed);
  std::copy_n(results.memory, rows * columns, out);
  return report(problem);
}

// Writes the row and column of an element of a fragment; `table` selects the table.
extern "C" void place(int64_t table, int64_t lane, int64_t element, int64_t* out) {
  Place (*const tables[])(int, int) = {mma_a_place, mma_b_place, mma_sum_place, load_matrix_place,
                                       load_matrix_transposed_place};
  const Place found = tables[table](static_cast<int>(lane), static_cast<int>(element));
  out[0] = found.row;
  out[1] = found.column;
}

extern "C" int64_t address_lane(int64_t matrix, int64_t row) {
  return load_matrix_address_lane(static_cast<int>(matrix), static_cast<int>(row));
}

// Writes the result of each collective for each lane: [kind][lane]. The value of a lane is 3 lane + 1.
extern "C" const char* collectives(int64_t seed, int64_t* out) {
  return report(shim::launch(1, 32, seed, [&] {
    const int own = 3 * lane() + 1;
    out[lane()] = shuffle(own, (lane() + 5) % 32);
    out[32 + lane()] = shuffle_xor(own, 6);
    out[64 + lane()] = ballot(own % 2 == 0);
    out[96 + lane()] = vote_any(lane() == 31) + 2 * vote_any(false) + 4 * vote_all(own > 0) + 8 * vote_all(lane() > 0);
    out[128 + lane()] = count_bits(0x80000101u);
  }));
}

// Writes the order in which the threads of two warps reach a counter between two barriers.
extern "C" const char* order_of_threads(int64_t seed, int64_t* out) {
  int32_t next = 0;
  return report(shim::launch(1, 64, seed, [&] {
    barrier();
    out[atomic_add(&next, int32_t{1})] = thread_index();
    barrier();
  }));
}

// Blocks write, wait at a grid barrier, and sum what all blocks wrote; twice. Rules: 0 no error, 1 no barrier, 2 one
// block leaves before the second barrier, 3 the blocks are not resident together.
extern "C" const char* barriers_of_the_grid(int64_t rule, int64_t seed, int64_t n_blocks, int64_t* out) {
  std::vector<int64_t> first(n_blocks, 0), second(n_blocks, 0);
  int32_t arrived = 0;
  const auto body = [&] {
    const auto sum = [&](const std::vector<int64_t>& values) {
      int64_t total = 0;
      for (const int64_t value : values) total += value;
      return total;
    };
    if (thread_index() == 33) first[block_index()] = block_index() + 1;
    if (rule != 1) grid_barrier(&arrived, 1);
    if (thread_index() == 7) second[block_index()] = sum(first);
    if (rule == 2 && block_index() == 1) return;
    if (rule != 1) grid_barrier(&arrived, 2);
    if (thread_index() == 40) out[block_index()] = sum(second);
  };
  return report(rule == 3 ? shim::launch(n_blocks, 64, seed, body) : shim::launch_together(n_blocks, 64, seed, body));
}

// Each case but the first breaks one rule.
extern "C" const char* broken(int64_t rule, int64_t seed) {
  alignas(16) static float source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  return report(shim::launch(
      1, 64, seed,
      [&] {
        ITM_FAST_SHARED(float, numbers, 64);
        ITM_FAST_SHARED(int32_t, counts, 1);
        ITM_FAST_SHARED(uint16_t, halves, 64);
        ITM_FAST_DYNAMIC_SHARED(float, floats, 0, 64);
        ITM_FAST_DYNAMIC_SHARED(uint16_t, words, 0, 128);
        const int t = thread_index();
        switch (rule) {
          case 0:  // breaks no rule
            numbers[t] = 1.0f;
            if (t == 0) counts[0] = 0;
            barrier();
            numbers[t] = static_cast<float>(numbers[t]) + 1.0f;
            atomic_add(counts, 0, 1);
            warp_sync();
            if (lane() == 0) numbers[t + 1] = static_cast<float>(numbers[t + 2]);
            words[127 - t] = static_cast<uint16_t>(t);
            barrier();
            floats[t] = static_cast<float>(t);
            barrier();
            if (static_cast<float>(floats[63 - t]) != static_cast<float>(63 - t))
              shim::fail("another number came back");
            break;
          case 1:
            numbers[t + 1] = 0.0f;
            break;
          case 2:
            numbers[t] = static_cast<float>(numbers[t]);
            break;
          case 3:
            numbers[t / 2] = 0.0f;
            break;
          case 4:
            if (t == 0) counts[0] = 0;
            barrier();
            atomic_add(counts, 0, 1);
            if (t == 40) counts[0] = 5;
            break;
          case 5:
            if (t != 7) barrier();
            break;
          case 6:
            if (lane() < 16) warp_sync();
            if (lane() >= 16) vote_any(true);
            break;
          case 7:
            copy_async(numbers, t % 16 * 4 + 1, source, 4);
            break;
          case 8:
            if (t == 0) copy_async(numbers, 0, source, 4);
            if (t == 0) commit_copies();
            break;
          case 9: {
            halves[t] = 0;
            barrier();
            uint32_t parts[4];
            load_matrix(parts, halves, 1);
            break;
          }
          case 10: {  // a shuffle does not synchronise memory
            numbers[t] = 0.0f;
            shuffle(t, 0);
            if (t == 0) numbers[1] = 2.0f;
            break;
          }
          case 11:
            if (t == 9) {
              counts[0] = 0;
              static_cast<int32_t*>(counts.memory.update_atomically(0))[2] = 0;
            }
            break;
          case 12:  // data written through one array and read through another
            words[2 * t] = words[2 * t + 1] = 1;
            floats[t] = static_cast<float>(floats[t]);
            break;
          case 13:
            words[2 * t] = 1;
            floats[(t + 32) % 64] = 1.0f;
            break;
          case 14: {
            ITM_FAST_DYNAMIC_SHARED(float, beyond, 128, 64);
            beyond[t] = 1.0f;
            break;
          }
          case 15:
            floats[t + 1] = 1.0f;
            break;
          case 16:
            if (t == 0) copy_async(words, 8, reinterpret_cast<const uint16_t*>(source), 8);
            barrier();
            if (t == 32) floats[5] = 1.0f;
            break;
        }
      },
      256));
}

// Converts 16-bit numbers to float32, and float32 to 16 bits.
extern "C" void widen_halves(int64_t half, int64_t count, const uint16_t* bits, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = half != 0 ? widen(Half{bits[i]}) : widen(BFloat16{bits[i]});
}
extern "C" void narrow_floats(int64_t half, int64_t count, const float* values, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    Half of_half;
    BFloat16 of_bfloat;
    narrow(values[i], of_half);
    narrow(values[i], of_bfloat);
    out[i] = half != 0 ? of_half.bits : of_bfloat.bits;
  }
}
