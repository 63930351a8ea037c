// The products of two runs of rows on tensor cores: the raw scores of a tile, written to shared memory.
//
// Asynchronous copies load slices of the rows, 64 bytes each, into a ring of stages. Rows with a stride that is not a
// multiple of 16 bytes are copied element by element. Every fourth row starts with a different one of its four 16-byte
// parts, so that the eight rows of a load_matrix are in different banks.
//
// Rows of 16 bits are multiplied without conversion. Rows of float32 are split into kParts bfloat16 numbers, rounded to
// nearest, x = x_0 + x_1 + x_2. One part gives a bfloat16 product. Two parts (three products, without x_1 y_1) give
// errors of about 2^-17 of the terms. Three parts (six products, without those of the order 2^-27) give the accuracy of
// float32; the products of a slice are added up separately, smallest first. Three TF32 products take as long on tensor
// cores as six of bfloat16, but keep 22 bits of 24.
#pragma once

#include <type_traits>

#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/fragments.h"
#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

// kRows x kColumns products. Of the kWarpRows x kWarpColumns warps, each takes every kWarpRows-th group of 16 rows and
// every kWarpColumns-th group of 8 columns. kWindow is that of plan_tiles.
template <int kTileRows, int kTileColumns, int kRowWarps, int kColumnWarps, int kRing, int kPlanWindow>
struct ProductTile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kStages = kRing, kWindow = kPlanWindow;
  static constexpr int kWarpRows = kRowWarps, kWarpColumns = kColumnWarps;
  static constexpr int kWarps = kWarpRows * kWarpColumns, kThreads = 32 * kWarps;
  static constexpr int kRowTiles = (kRows / 16 + kWarpRows - 1) / kWarpRows;  // per warp; the last may lie outside
  static constexpr int kColumnTiles = kColumns / 8 / kWarpColumns;
  // Gram matrices are products of the rows with themselves.
  static_assert(kRows % 16 == 0 && kColumns % (16 * kWarpColumns) == 0 && kRows <= kColumns && kStages >= 2);

  static constexpr int kSlice = 32;  // of a row, in 16-bit units: 64 bytes
  static constexpr int kStage = (kRows + kColumns) * kSlice;
  // Odd, so that adjacent rows and adjacent columns are in different banks.
  static constexpr int kScoreStride = kColumns + 1;
  static constexpr int kScores = kRows * kScoreStride;
  static constexpr int kProductBytes =
      kStages * kStage * 2 > kScores * 4 ? kStages * kStage * 2 : (kScores * 4 + 15) / 16 * 16;
};

#define ITM_FAST_TILE_SCORES(Tile) ITM_FAST_DYNAMIC_SHARED(float, scores, 0, Tile::kScores)

template <typename S>
struct RowRun {
  const S* first;
  int count;
  int64_t stride;  // elements from one row to the next
};

// Offset of a 16-byte part of a row in its stage.
template <typename Tile>
ITM_FAST_DEVICE int part_place(int row, int part) {
  return row * Tile::kSlice + (part ^ (row / 2 % 4)) * 8;
}

// Starts copying slice `slice` of both runs to its stage. Elements outside of the runs become zero.
template <typename Tile, typename S>
ITM_FAST_DEVICE void copy_slice(SharedArray<uint16_t> stages, const RowRun<S>& rows, const RowRun<S>& columns,
                                int64_t dim, bool is_aligned, int slice) {
  constexpr int kHalves = sizeof(S) / 2;
  const int64_t width = dim * kHalves;
  const int stage = slice % Tile::kStages * Tile::kStage;
  for (int i = thread_index(); i < (Tile::kRows + Tile::kColumns) * 4; i += Tile::kThreads) {
    const int row = i / 4, part = i % 4;
    const int at = stage + part_place<Tile>(row, part);
    const bool is_row = row < Tile::kRows;
    // Copy the members: taking the address of one of the two runs would keep both out of registers.
    const RowRun<S> run{is_row ? rows.first : columns.first, is_row ? rows.count : columns.count,
                        is_row ? rows.stride : columns.stride};
    const int of_run = is_row ? row : row - Tile::kRows;
    const int64_t half = int64_t{slice} * Tile::kSlice + part * 8, left = of_run < run.count ? width - half : 0;
    const int count = left >= 8 ? 8 : left > 0 ? static_cast<int>(left) : 0;
    const uint16_t* source =
        reinterpret_cast<const uint16_t*>(run.first) + (count > 0 ? of_run * run.stride * kHalves + half : 0);
    if (is_aligned) {
      copy_async(stages, at, source, count);
    } else {
      for (int h = 0; h < 8; ++h) {
        uint16_t bits = 0;
        if (h < count) __builtin_memcpy(&bits, source + h, sizeof(bits));
        stages[at + h] = bits;
      }
    }
  }
}

// Two floats as kParts pairs of bfloat16 that add up to them.
template <int kParts>
ITM_FAST_DEVICE void split_pair(uint32_t first, uint32_t second, uint32_t (&parts)[kParts]) {
  float low, high;
  __builtin_memcpy(&low, &first, sizeof(low));
  __builtin_memcpy(&high, &second, sizeof(high));
  for (int part = 0; part < kParts; ++part) {
    parts[part] = bf16_pair(low, high);
    low -= bf16_value(static_cast<uint16_t>(parts[part]));
    high -= bf16_value(static_cast<uint16_t>(parts[part] >> 16));
  }
}

// The fragments of 16 rows and of 8 columns, 16 elements deep.
template <int kParts>
struct RowFragment {
  uint32_t parts[kParts][4];
};
template <int kParts>
struct ColumnFragment {
  uint32_t parts[kParts][2];
};

// Rows of 16 bits: `step` is the half of the slice.
template <typename Tile>
ITM_FAST_DEVICE void load_rows(RowFragment<1>& rows, SharedArray<uint16_t> stages, int stage, int first, int step) {
  const int matrix = lane() / 8;
  const int row = first + matrix % 2 * 8 + lane() % 8;
  load_matrix(rows.parts[0], stages, stage + part_place<Tile>(row, step * 2 + matrix / 2));
}

template <typename Tile>
ITM_FAST_DEVICE void load_columns(ColumnFragment<1> (&columns)[2], SharedArray<uint16_t> stages, int stage, int first,
                                  int second, int step) {
  const int matrix = lane() / 8;
  const int row = (matrix < 2 ? first : second) + lane() % 8;
  uint32_t loaded[4];
  load_matrix(loaded, stages, stage + part_place<Tile>(row, step * 2 + matrix % 2));
  for (int i = 0; i < 4; ++i) columns[i / 2].parts[0][i % 2] = loaded[i];
}

// Eight rows of a slice of float32, in the layout of fragments except for the order of the depth, which is the same for
// rows and columns: register p holds elements l and l + 4 of parts 2 p and 2 p + 1, for lane % 4 == l.
template <typename Tile, int kParts>
ITM_FAST_DEVICE void load_floats(uint32_t (&pairs)[2][kParts], SharedArray<uint16_t> stages, int stage, int first) {
  uint32_t loaded[4];
  load_matrix(loaded, stages, stage + part_place<Tile>(first + lane() % 8, lane() / 8));
  split_pair(loaded[0], loaded[1], pairs[0]);
  split_pair(loaded[2], loaded[3], pairs[1]);
}

template <typename Tile, int kParts>
ITM_FAST_DEVICE void load_float_rows(RowFragment<kParts>& rows, SharedArray<uint16_t> stages, int stage, int first) {
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[2][kParts];
    load_floats<Tile>(pairs, stages, stage, first + half * 8);
    for (int part = 0; part < kParts; ++part) {
      rows.parts[part][half] = pairs[0][part];
      rows.parts[part][half + 2] = pairs[1][part];
    }
  }
}

template <typename Tile, int kParts>
ITM_FAST_DEVICE void load_float_columns(ColumnFragment<kParts>& columns, SharedArray<uint16_t> stages, int stage,
                                        int first) {
  uint32_t pairs[2][kParts];
  load_floats<Tile>(pairs, stages, stage, first);
  for (int part = 0; part < kParts; ++part) {
    for (int i = 0; i < 2; ++i) columns.parts[part][i] = pairs[i][part];
  }
}

template <bool kHalf, int kParts>
ITM_FAST_DEVICE void multiply_parts(float (&sums)[4], const RowFragment<kParts>& rows,
                                    const ColumnFragment<kParts>& columns, int row_part, int column_part) {
  if (kHalf) {
    mma_fp16(sums, rows.parts[row_part], columns.parts[column_part]);
  } else {
    mma_bf16(sums, rows.parts[row_part], columns.parts[column_part]);
  }
}

// Rows times the columns of two fragments, whose products alternate so that neither waits for the other. `kBySlice`:
// the products of a slice are added up separately, then added to the sums in true float32.
template <bool kHalf, bool kBySlice, int kParts>
ITM_FAST_DEVICE void multiply_pair(float (&first_sums)[4], float (&second_sums)[4], const RowFragment<kParts>& rows,
                                   const ColumnFragment<kParts>& first, const ColumnFragment<kParts>& second) {
  if constexpr (kBySlice) {
    float first_slice[4] = {}, second_slice[4] = {};
    multiply_pair<kHalf, false>(first_slice, second_slice, rows, first, second);
    for (int i = 0; i < 4; ++i) {
      first_sums[i] += first_slice[i];
      second_sums[i] += second_slice[i];
    }
  } else {
    constexpr int kProducts = kParts == 3 ? 6 : kParts == 2 ? 3 : 1;
    constexpr int kOrder[6][2] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}, {0, 0}};  // fewer parts use the last ones
    for (int i = 6 - kProducts; i < 6; ++i) {
      multiply_parts<kHalf>(first_sums, rows, first, kOrder[i][0], kOrder[i][1]);
      multiply_parts<kHalf>(second_sums, rows, second, kOrder[i][0], kOrder[i][1]);
    }
  }
}

// Writes <row r, column c> to ITM_FAST_TILE_SCORES at r * kScoreStride + c, for all rows and columns of the tile that
// the runs have, from `dim` elements of each. Ends with a barrier. `is_aligned`: rows are aligned to 16 bytes.
// `kBySlice`: the products of each slice are added up separately, because tensor cores truncate running sums. If all
// terms have the same sign, as on the diagonal of a Gram matrix, the truncation errors add up.
template <int kParts, typename Tile, bool kBySlice = kParts == 3, typename S>
ITM_FAST_DEVICE void multiply_tile(const RowRun<S>& rows, const RowRun<S>& columns, int64_t dim, bool is_aligned) {
  constexpr bool kFloat = std::is_same_v<S, float>, kHalf = std::is_same_v<S, Half>;
  static_assert(kFloat || kParts == 1);
  constexpr int kRowTiles = Tile::kRowTiles, kColumnTiles = Tile::kColumnTiles;
  ITM_FAST_DYNAMIC_SHARED(uint16_t, stages, 0, Tile::kStages* Tile::kStage);
  const int slices = static_cast<int>((dim * static_cast<int64_t>(sizeof(S)) + 63) / 64);
  const int warp_row = warp() / Tile::kWarpColumns, warp_column = warp() % Tile::kWarpColumns;
  // Tiles are assigned round-robin, so that short runs do not leave all work to one warp.
  const auto row_of = [&](int m) { return (warp_row + m * Tile::kWarpRows) * 16; };
  const auto column_of = [&](int n) { return (warp_column + n * Tile::kWarpColumns) * 8; };

  float sums[kRowTiles][kColumnTiles][4] = {};
  for (int slice = 0; slice < Tile::kStages - 1; ++slice) {
    if (slice < slices) copy_slice<Tile>(stages, rows, columns, dim, is_aligned, slice);
    commit_copies();
  }
  for (int slice = 0; slice < slices; ++slice) {
    wait_copies<Tile::kStages - 2>();
    barrier();  // The copies of all threads have landed, and all are done with the stage that is filled next.
    const int next = slice + Tile::kStages - 1;
    if (next < slices) copy_slice<Tile>(stages, rows, columns, dim, is_aligned, next);
    commit_copies();  // An empty group counts, too: the number of pending groups stays the same.

    const int stage = slice % Tile::kStages * Tile::kStage;
    const int column_stage = stage + Tile::kRows * Tile::kSlice;
    for (int step = 0; step < (kFloat ? 1 : 2); ++step) {
      ColumnFragment<kParts> of_columns[kColumnTiles];
      for (int n = 0; n < kColumnTiles; n += 2) {
        if constexpr (kFloat) {
          load_float_columns<Tile>(of_columns[n], stages, column_stage, column_of(n));
          load_float_columns<Tile>(of_columns[n + 1], stages, column_stage, column_of(n + 1));
        } else {
          ColumnFragment<1> pair[2];
          load_columns<Tile>(pair, stages, column_stage, column_of(n), column_of(n + 1), step);
          of_columns[n] = pair[0];
          of_columns[n + 1] = pair[1];
        }
      }
      for (int m = 0; m < kRowTiles; ++m) {
        if (row_of(m) < Tile::kRows && row_of(m) < rows.count) {  // The same for the whole warp.
          RowFragment<kParts> of_rows;
          if constexpr (kFloat) {
            load_float_rows<Tile>(of_rows, stages, stage, row_of(m));
          } else {
            load_rows<Tile>(of_rows, stages, stage, row_of(m), step);
          }
          for (int n = 0; n < kColumnTiles; n += 2) {
            if (column_of(n) < columns.count) {
              multiply_pair<kHalf, kBySlice>(sums[m][n], sums[m][n + 1], of_rows, of_columns[n], of_columns[n + 1]);
            }
          }
        }
      }
    }
  }
  wait_copies<0>();
  barrier();  // The scores lie where the stages were.

  ITM_FAST_TILE_SCORES(Tile);
  for (int m = 0; m < kRowTiles; ++m) {
    if (row_of(m) >= Tile::kRows || row_of(m) >= rows.count) continue;
    for (int n = 0; n < kColumnTiles; ++n) {
      for (int i = 0; i < 4; ++i) {
        const Place place = mma_sum_place(lane(), i);
        scores[(row_of(m) + place.row) * Tile::kScoreStride + column_of(n) + place.column] = sums[m][n][i];
      }
    }
  }
  barrier();
}

}  // namespace itm_fast::cuda
