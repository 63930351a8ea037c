// AMX tiles of bfloat16. A block has 32 x 32 float32 sums: four tiles, from two tiles of rows and two of columns.
//
// A tile has 16 rows of 64 bytes. A tile of rows holds 16 rows of 16 cells. A tile of columns holds 16 cells, each a
// row of 16 columns. A tile of sums holds 16 x 16 float32. ITM_FAST_AMX_SIMULATED replaces the instructions by the
// arithmetic of their specification, so that tests can run the same block on any processor.
#pragma once

#include "itm_fast/cpu/matrix.h"

namespace itm_fast::ITM_FAST_ISA {

inline constexpr int kAmxRows = 16;
inline constexpr int kAmxRowBytes = 64;
inline constexpr int kAmxLine = kAmxRowBytes / static_cast<int>(sizeof(BFloat16Pair));  // cells in a row of a tile

#if defined(ITM_FAST_AMX_SIMULATED)

struct AmxTile {
  uint32_t words[kAmxRows][kAmxLine];
};
inline AmxTile simulated_tiles[8];

#define ITM_FAST_TILE_ZERO(tile) \
  simulated_tiles[tile] = AmxTile {}
#define ITM_FAST_TILE_LOAD(tile, source, stride_bytes) simulated_tile_load(simulated_tiles[tile], source, stride_bytes)
#define ITM_FAST_TILE_STORE(tile, target, stride_bytes) \
  simulated_tile_store(simulated_tiles[tile], target, stride_bytes)
#define ITM_FAST_TILE_MULTIPLY(sum, a, b) \
  simulated_tile_multiply(simulated_tiles[sum], simulated_tiles[a], simulated_tiles[b])

inline void simulated_tile_load(AmxTile& tile, const void* source, int64_t stride) {
  for (int row = 0; row < kAmxRows; ++row) {
    __builtin_memcpy(tile.words[row], static_cast<const char*>(source) + row * stride, kAmxRowBytes);
  }
}

inline void simulated_tile_store(const AmxTile& tile, void* target, int64_t stride) {
  for (int row = 0; row < kAmxRows; ++row) {
    __builtin_memcpy(static_cast<char*>(target) + row * stride, tile.words[row], kAmxRowBytes);
  }
}

inline float half_of_cell(uint32_t cell, int half) {
  return widen(BFloat16{static_cast<uint16_t>(half == 0 ? cell & 0xffff : cell >> 16)});
}

// TDPBF16PS: for each cell of the shared dimension in order, adds the product of the lower halves, then of the upper.
inline void simulated_tile_multiply(AmxTile& sum, const AmxTile& a, const AmxTile& b) {
  for (int row = 0; row < kAmxRows; ++row) {
    float sums[kAmxLine];
    __builtin_memcpy(sums, sum.words[row], kAmxRowBytes);
    for (int cell = 0; cell < kAmxLine; ++cell) {
      for (int column = 0; column < kAmxLine; ++column) {
        for (int half = 0; half < 2; ++half) {
          sums[column] += half_of_cell(a.words[row][cell], half) * half_of_cell(b.words[cell][column], half);
        }
      }
    }
    __builtin_memcpy(sum.words[row], sums, kAmxRowBytes);
  }
}

struct AmxTiles {};

#else

// The compilers' intrinsics are not used: GCC's do not declare that they read memory.
#define ITM_FAST_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile::: "memory")
#define ITM_FAST_TILE_LOAD(tile, source, stride_bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(source), "r"(int64_t{stride_bytes}) : "memory")
#define ITM_FAST_TILE_STORE(tile, target, stride_bytes) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(target), "r"(int64_t{stride_bytes}) : "memory")
#define ITM_FAST_TILE_MULTIPLY(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")

// Configures the calling thread's tiles for the lifetime of this object. Other libraries configure tiles before they
// use them, so the previous configuration is not restored.
class AmxTiles {
 public:
  ITM_FAST_INLINE AmxTiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } configuration;
    for (int tile = 0; tile < 8; ++tile) {
      configuration.row_bytes[tile] = kAmxRowBytes;
      configuration.rows[tile] = kAmxRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
  }
  ITM_FAST_INLINE ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

#endif

// Sums in tiles 0 to 3, rows in 4 and 5, columns in 6 and 7.
ITM_FAST_INLINE void amx_multiply_part(const BFloat16Pair* rows, int64_t row_stride, const BFloat16Pair* panel,
                                       int64_t depth) {
  constexpr int64_t kPanelBytes = kPanelColumns<float> * sizeof(BFloat16Pair);
  const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof(BFloat16Pair));
  for (int64_t k = 0; k < depth; k += kAmxLine) {
    const BFloat16Pair* columns = panel + k * kPanelColumns<float>;
    ITM_FAST_TILE_LOAD(6, columns, kPanelBytes);
    ITM_FAST_TILE_LOAD(4, rows + k, row_bytes);
    ITM_FAST_TILE_MULTIPLY(0, 4, 6);
    ITM_FAST_TILE_LOAD(7, columns + kAmxLine, kPanelBytes);
    ITM_FAST_TILE_MULTIPLY(1, 4, 7);
    ITM_FAST_TILE_LOAD(5, rows + kAmxRows * row_stride + k, row_bytes);
    ITM_FAST_TILE_MULTIPLY(2, 5, 6);
    ITM_FAST_TILE_MULTIPLY(3, 5, 7);
  }
}

// raw (32, 32) += rows (32, depth) * panel (depth, 32), or raw = if `first`; `depth` is a multiple of kAmxLine. Two
// parts give three products: the product of the two remainders is negligible.
template <int Parts>
ITM_FAST_INLINE void amx_multiply_block(const BFloat16Pair* rows, int64_t row_stride, int64_t row_part,
                                        const BFloat16Pair* panel, int64_t panel_part, int64_t depth, bool first,
                                        float* raw, int64_t stride) {
  static_assert(kPanelColumns<float> == 2 * kAmxLine);
  const int64_t raw_bytes = stride * static_cast<int64_t>(sizeof(float));
  float* lower = raw + kAmxRows * stride;
  if (first) {
    ITM_FAST_TILE_ZERO(0);
    ITM_FAST_TILE_ZERO(1);
    ITM_FAST_TILE_ZERO(2);
    ITM_FAST_TILE_ZERO(3);
  } else {
    ITM_FAST_TILE_LOAD(0, raw, raw_bytes);
    ITM_FAST_TILE_LOAD(1, raw + kAmxLine, raw_bytes);
    ITM_FAST_TILE_LOAD(2, lower, raw_bytes);
    ITM_FAST_TILE_LOAD(3, lower + kAmxLine, raw_bytes);
  }
  amx_multiply_part(rows, row_stride, panel, depth);
  if constexpr (Parts == 2) {
    amx_multiply_part(rows, row_stride, panel + panel_part, depth);
    amx_multiply_part(rows + row_part, row_stride, panel, depth);
  }
  ITM_FAST_TILE_STORE(0, raw, raw_bytes);
  ITM_FAST_TILE_STORE(1, raw + kAmxLine, raw_bytes);
  ITM_FAST_TILE_STORE(2, lower, raw_bytes);
  ITM_FAST_TILE_STORE(3, lower + kAmxLine, raw_bytes);
}

}  // namespace itm_fast::ITM_FAST_ISA
