// The products of two runs of rows on tensor cores: the raw scores of a tile, written to shared memory.
//
// Asynchronous copies load slices of the rows, 64 bytes each, into a ring of stages. Rows with a stride that is not a
// multiple of 16 bytes are copied element by element. Every fourth row starts with a different one of its four 16-byte
// parts, so that the eight rows of a load_matrix are in different banks.
//
// Rows of 16 bits are multiplied without conversion. Rows of float32 are split into kParts bfloat16 numbers, rounded to
// nearest, x = x_0 + x_1 + x_2. One part gives a bfloat16 product. Two parts (three products, without x_1 y_1) give
// errors of about 2^-17 of the terms. Three parts (six products, without those of the order 2^-27) give the accuracy of
// float32. With several parts, the products of a slice are added up separately, smallest first. Three TF32 products
// take as long on tensor cores as six of bfloat16, but keep 22 bits of 24.
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
  // Products with few columns have their own loop, for the first kFewTiles tiles of columns of each warp. The loops
  // then never compare columns: a branch per product would keep the compiler from overlapping independent products. 0:
  // the loop for tiles that are not full compares the columns of each product.
  static constexpr int kFewTiles = 0;
  static_assert(kRows % 16 == 0 && kColumns % (16 * kWarpColumns) == 0 && kStages >= 2);

  static constexpr int kSlice = 32;  // of a row, in 16-bit units: 64 bytes
  static constexpr int kStage = (kRows + kColumns) * kSlice;
  // Odd, so that adjacent rows and adjacent columns are in different banks. Stores of accumulators, eight rows by four
  // pairs of columns, still meet in some banks.
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

// Wider rows are refused, so that places within a tile fit 32 bits.
inline constexpr int64_t kWidestRow = int64_t{1} << 24;

// How slices are copied: asynchronously in parts of 16 bytes, for aligned rows, or else element by element. Rows may
// end within a part, or only at the end of one.
enum class Copies { whole_parts, parts, elements };

// Copies the slices of both runs to their stages, one after another. A thread copies the same parts of every slice, so
// that pointers only advance. Elements outside of the runs become zero.
template <typename Tile, typename S>
class SliceCopies {
  // Rows between two parts of a thread. The parts lie at the same place of their rows.
  static constexpr int kApart = Tile::kThreads / 4;
  static_assert(kApart % 8 == 0);
  static constexpr int kOfRows = (Tile::kRows + kApart - 1) / kApart;
  static constexpr int kOfBoth = kOfRows + (Tile::kColumns + kApart - 1) / kApart;
  static constexpr int kHalves = sizeof(S) / 2;

 public:
  ITM_FAST_DEVICE SliceCopies(const RowRun<S>& rows, const RowRun<S>& columns, int64_t dim)
      : rows_(reinterpret_cast<const uint16_t*>(rows.first)),
        columns_(reinterpret_cast<const uint16_t*>(columns.first)),
        place_(part_place<Tile>(thread_index() / 4, thread_index() % 4)),
        left_(static_cast<int>(dim * kHalves) - thread_index() % 4 * 8) {
    ITM_FAST_UNROLLED
    for (int i = 0; i < kOfBoth; ++i) {
      const RowRun<S>& run = i < kOfRows ? rows : columns;
      const int row = row_of(i);
      is_row_[i] = row < run.count;
      offsets_[i] = static_cast<uint32_t>((is_row_[i] ? row * run.stride * kHalves : 0) + thread_index() % 4 * 8);
    }
  }

  // Starts copying the next slice to the stage at `stage`.
  template <Copies kCopies>
  ITM_FAST_DEVICE void start(SharedArray<uint16_t> stages, int stage) {
    constexpr int kRowsEnd = Tile::kRows * Tile::kSlice;
    const int at = stage + place_;
    ITM_FAST_UNROLLED
    for (int i = 0; i < kOfBoth; ++i) {
      const bool of_rows = i < kOfRows;
      const int before = (of_rows ? i : i - kOfRows) * kApart, n_rows = of_rows ? Tile::kRows : Tile::kColumns;
      const int target = at + (of_rows ? 0 : kRowsEnd) + before * Tile::kSlice;
      const uint16_t* source = (of_rows ? rows_ : columns_) + offsets_[i];
      if (before + kApart <= n_rows || row_of(i) < n_rows) {
        if constexpr (kCopies == Copies::whole_parts) {
          copy_async(stages, target, source, is_row_[i] && left_ > 0 ? 8 : 0);
        } else if constexpr (kCopies == Copies::parts) {
          const int count = left_ >= 8 ? 8 : left_ > 0 ? left_ : 0;
          copy_async(stages, target, source, is_row_[i] ? count : 0);
        } else {
          for (int h = 0; h < 8; ++h) {
            uint16_t bits = 0;
            if (is_row_[i] && h < left_) __builtin_memcpy(&bits, source + h, sizeof(bits));
            stages[target + h] = bits;
          }
        }
      }
    }
    rows_ += Tile::kSlice;
    columns_ += Tile::kSlice;
    left_ -= Tile::kSlice;
  }

 private:
  ITM_FAST_DEVICE static int row_of(int i) { return thread_index() / 4 + (i < kOfRows ? i : i - kOfRows) * kApart; }

  const uint16_t *rows_, *columns_;  // of the next slice
  int place_, left_;                 // of the first part in a stage; 16-bit units that its row still has
  bool is_row_[kOfBoth];
  uint32_t offsets_[kOfBoth];  // of the parts, from the first row of their run
};

// Two floats as kParts pairs of bfloat16 that add up to them.
template <int kParts>
ITM_FAST_DEVICE void split_floats(float low, float high, uint32_t (&parts)[kParts]) {
  for (int part = 0; part < kParts; ++part) {
    parts[part] = bf16_pair(low, high);
    low -= bf16_value(static_cast<uint16_t>(parts[part]));
    high -= bf16_value(static_cast<uint16_t>(parts[part] >> 16));
  }
}

// The same for the bits of two floats.
template <int kParts>
ITM_FAST_DEVICE void split_pair(uint32_t first, uint32_t second, uint32_t (&parts)[kParts]) {
  float low, high;
  __builtin_memcpy(&low, &first, sizeof(low));
  __builtin_memcpy(&high, &second, sizeof(high));
  split_floats(low, high, parts);
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

// Where a lane reads fragments in the first step of a slice: its row of a matrix, in the first tile of rows, or in the
// first two tiles of columns. Other tiles lie a multiple of eight rows away, at the same place of their rows.
template <typename Tile, bool kFloat>
ITM_FAST_DEVICE int lane_of_rows(int first) {
  const int matrix = lane() / 8, row = first + lane() % 8;
  return kFloat ? part_place<Tile>(row, matrix) : part_place<Tile>(row + matrix % 2 * 8, matrix / 2);
}

template <typename Tile, bool kFloat>
ITM_FAST_DEVICE int lane_of_columns(int first) {
  const int matrix = lane() / 8, row = first + lane() % 8;
  return kFloat ? part_place<Tile>(row, matrix)
                : part_place<Tile>(row + matrix / 2 * 8 * Tile::kWarpColumns, matrix % 2);
}

// The same place in the second half of a slice of 16-bit rows.
constexpr int second_step(int place) { return place ^ 16; }

ITM_FAST_DEVICE void load_rows(RowFragment<1>& rows, SharedArray<uint16_t> stages, int at) {
  load_matrix(rows.parts[0], stages, at);
}

ITM_FAST_DEVICE void load_columns(ColumnFragment<1>& first, ColumnFragment<1>& second, SharedArray<uint16_t> stages,
                                  int at) {
  uint32_t loaded[4];
  load_matrix(loaded, stages, at);
  for (int i = 0; i < 2; ++i) {
    first.parts[0][i] = loaded[i];
    second.parts[0][i] = loaded[2 + i];
  }
}

// Eight rows of a slice of float32, in the layout of fragments except for the order of the depth, which is the same for
// rows and columns: register p holds elements l and l + 4 of parts 2 p and 2 p + 1, for lane % 4 == l.
template <int kParts>
ITM_FAST_DEVICE void load_floats(uint32_t (&pairs)[2][kParts], SharedArray<uint16_t> stages, int at) {
  uint32_t loaded[4];
  load_matrix(loaded, stages, at);
  split_pair(loaded[0], loaded[1], pairs[0]);
  split_pair(loaded[2], loaded[3], pairs[1]);
}

template <typename Tile, int kParts>
ITM_FAST_DEVICE void load_float_rows(RowFragment<kParts>& rows, SharedArray<uint16_t> stages, int at) {
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[2][kParts];
    load_floats(pairs, stages, at + half * 8 * Tile::kSlice);
    for (int part = 0; part < kParts; ++part) {
      rows.parts[part][half] = pairs[0][part];
      rows.parts[part][half + 2] = pairs[1][part];
    }
  }
}

template <int kParts>
ITM_FAST_DEVICE void load_float_columns(ColumnFragment<kParts>& columns, SharedArray<uint16_t> stages, int at) {
  uint32_t pairs[2][kParts];
  load_floats(pairs, stages, at);
  for (int part = 0; part < kParts; ++part) {
    for (int i = 0; i < 2; ++i) columns.parts[part][i] = pairs[i][part];
  }
}

template <bool kHalf, int kRowParts, int kColumnParts>
ITM_FAST_DEVICE void multiply_parts(float (&sums)[4], const RowFragment<kRowParts>& rows,
                                    const ColumnFragment<kColumnParts>& columns, int row_part, int column_part) {
  if (kHalf) {
    mma_fp16(sums, rows.parts[row_part], columns.parts[column_part]);
  } else {
    mma_bf16(sums, rows.parts[row_part], columns.parts[column_part]);
  }
}

// Rows times the columns of two fragments, whose products alternate so that neither waits for the other. `kBySlice`:
// the products of a slice are added up separately, then added to the sums in true float32.
template <bool kHalf, bool kBySlice, int kRowParts, int kColumnParts>
ITM_FAST_DEVICE void multiply_pair(float (&first_sums)[4], float (&second_sums)[4], const RowFragment<kRowParts>& rows,
                                   const ColumnFragment<kColumnParts>& first,
                                   const ColumnFragment<kColumnParts>& second) {
  if constexpr (kBySlice) {
    float first_slice[4] = {}, second_slice[4] = {};
    multiply_pair<kHalf, false>(first_slice, second_slice, rows, first, second);
    for (int i = 0; i < 4; ++i) {
      first_sums[i] += first_slice[i];
      second_sums[i] += second_slice[i];
    }
  } else {
    constexpr int kParts = kRowParts > kColumnParts ? kRowParts : kColumnParts;
    constexpr int kOrder[6][2] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}, {0, 0}};  // fewer parts use the last ones
    ITM_FAST_UNROLLED
    for (int i = 0; i < 6; ++i) {
      if (kOrder[i][0] + kOrder[i][1] >= kParts || kOrder[i][0] >= kRowParts || kOrder[i][1] >= kColumnParts) continue;
      multiply_parts<kHalf>(first_sums, rows, first, kOrder[i][0], kOrder[i][1]);
      multiply_parts<kHalf>(second_sums, rows, second, kOrder[i][0], kOrder[i][1]);
    }
  }
}

// The sums of a warp: products of its tiles of rows and of columns. Tiles are assigned round-robin, so that short runs
// do not leave all work to one warp.
template <typename Tile>
struct WarpSums {
  float sums[Tile::kRowTiles][Tile::kColumnTiles][4] = {};

  ITM_FAST_DEVICE static int row_of(int m) { return (warp() / Tile::kWarpColumns + m * Tile::kWarpRows) * 16; }
  ITM_FAST_DEVICE static int column_of(int n) { return (warp() % Tile::kWarpColumns + n * Tile::kWarpColumns) * 8; }
};

// Adds the products of one stage with the first kColumnTiles tiles of columns of each warp. Fragments of 16-bit rows
// are loaded one tile ahead of their use.
template <int kParts, typename Tile, bool kFloat, bool kHalf, bool kBySlice, bool kWhole, int kColumnTiles>
ITM_FAST_DEVICE void add_stage(WarpSums<Tile>& warp_sums, SharedArray<uint16_t> stages, int rows_at, int columns_at,
                               int n_rows, int n_columns) {
  constexpr int kRowTiles = Tile::kRowTiles, kSteps = kFloat ? 1 : 2;
  constexpr bool kCompares = !kWhole && Tile::kFewTiles == 0;
  constexpr int kNextRows = 16 * Tile::kWarpRows * Tile::kSlice, kNextColumns = 8 * Tile::kWarpColumns * Tile::kSlice;
  ColumnFragment<kParts> columns[kSteps][kColumnTiles];
  // Conversions of float32 hide the latency of loads themselves, and need the registers.
  constexpr int kAhead = kFloat ? 0 : 1;
  RowFragment<kParts> rows[kAhead + 1];
  const auto load_next_columns = [&](int step) {
    const int at = step == 0 ? columns_at : second_step(columns_at);
    ITM_FAST_UNROLLED
    for (int n = 0; n < kColumnTiles; n += 2) {
      if constexpr (kFloat) {
        load_float_columns(columns[step][n], stages, at + n * kNextColumns);
        load_float_columns(columns[step][n + 1], stages, at + (n + 1) * kNextColumns);
      } else {
        load_columns(columns[step][n], columns[step][n + 1], stages, at + n * kNextColumns);
      }
    }
  };
  const auto load_next_rows = [&](int item) {
    const int at = (item < kRowTiles ? rows_at : second_step(rows_at)) + item % kRowTiles * kNextRows;
    if constexpr (kFloat) {
      load_float_rows<Tile>(rows[item % (kAhead + 1)], stages, at);
    } else {
      load_rows(rows[item % (kAhead + 1)], stages, at);
    }
  };
  load_next_columns(0);
  if (kAhead > 0) load_next_rows(0);
  ITM_FAST_UNROLLED
  for (int item = 0; item < kSteps * kRowTiles; ++item) {
    const int step = item / kRowTiles, m = item % kRowTiles;
    if (item + kAhead < kSteps * kRowTiles) load_next_rows(item + kAhead);
    if (m == 0 && step + 1 < kSteps) load_next_columns(step + 1);
    // Tiles that lie outside are the same for the whole warp. The vote shows the compiler.
    if (kWhole      ? (m + 1) * 16 * Tile::kWarpRows > Tile::kRows && WarpSums<Tile>::row_of(m) >= Tile::kRows
        : kCompares ? WarpSums<Tile>::row_of(m) >= n_rows
                    : vote_all(WarpSums<Tile>::row_of(m) >= n_rows))
      continue;
    ITM_FAST_UNROLLED
    for (int n = 0; n < kColumnTiles; n += 2) {
      if (!kCompares || WarpSums<Tile>::column_of(n) < n_columns) {
        multiply_pair<kHalf, kBySlice>(warp_sums.sums[m][n], warp_sums.sums[m][n + 1], rows[item % (kAhead + 1)],
                                       columns[step][n], columns[step][n + 1]);
      }
    }
  }
}

template <int kParts, typename Tile, bool kBySlice, Copies kCopies, bool kWhole, int kColumnTiles, typename S>
ITM_FAST_DEVICE void multiply_slices(WarpSums<Tile>& sums, const RowRun<S>& rows, const RowRun<S>& columns,
                                     int64_t dim) {
  constexpr bool kFloat = std::is_same_v<S, float>, kHalf = std::is_same_v<S, Half>;
  constexpr int kEnd = Tile::kStages * Tile::kStage;
  ITM_FAST_DYNAMIC_SHARED(uint16_t, stages, 0, kEnd);
  const int slices = static_cast<int>((dim * static_cast<int64_t>(sizeof(S)) + 63) / 64);
  const int rows_at = lane_of_rows<Tile, kFloat>(sums.row_of(0));
  const int columns_at = lane_of_columns<Tile, kFloat>(sums.column_of(0)) + Tile::kRows * Tile::kSlice;
  SliceCopies<Tile, S> copies(rows, columns, dim);
  for (int slice = 0; slice < Tile::kStages - 1; ++slice) {
    if (slice < slices) copies.template start<kCopies>(stages, slice * Tile::kStage);
    commit_copies();
  }
  int stage = 0, filled = (Tile::kStages - 1) * Tile::kStage;  // the stages that are multiplied and filled next
  for (int slice = 0; slice < slices; ++slice) {
    wait_copies<Tile::kStages - 2>();
    barrier();  // The copies of all threads have landed, and all are done with the stage that is filled next.
    if (slice + Tile::kStages - 1 < slices) copies.template start<kCopies>(stages, filled);
    commit_copies();  // An empty group counts, too: the number of pending groups stays the same.
    add_stage<kParts, Tile, kFloat, kHalf, kBySlice, kWhole, kColumnTiles>(
        sums, stages, stage + rows_at, stage + columns_at, rows.count, columns.count);
    filled = stage;
    stage = stage + Tile::kStage < kEnd ? stage + Tile::kStage : 0;
  }
  wait_copies<0>();
  barrier();  // The scores lie where the stages were.
}

// Writes <row r, column c> to ITM_FAST_TILE_SCORES at r * kScoreStride + c, for all rows and columns of the tile that
// the runs have, from `dim` elements of each. Ends with a barrier. `is_aligned`: rows are aligned to 16 bytes and can
// be copied as kAlignedCopies says. `kBySlice`: the products of each slice are added up separately, because tensor
// cores truncate running sums. If all terms have the same sign, as on the diagonal of a Gram matrix, the truncation
// errors add up.
template <int kParts, typename Tile, bool kBySlice = kParts >= 2, Copies kAlignedCopies = Copies::whole_parts,
          typename S>
ITM_FAST_DEVICE void multiply_tile(const RowRun<S>& rows, const RowRun<S>& columns, int64_t dim, bool is_aligned) {
  static_assert(std::is_same_v<S, float> || kParts == 1);
  WarpSums<Tile> of_warp;
  // Most tiles reach into the last tiles of all warps: they need no comparison per product. Kernels of one part that
  // convert rows or add up slices have no registers left for this path. The same holds for three parts that are cut.
  constexpr bool kMayBeWhole =
      kParts == 1 ? !kBySlice && !std::is_same_v<S, float> : kParts == 2 || kAlignedCopies == Copies::whole_parts;
  constexpr int kAll = Tile::kColumnTiles, kFew = Tile::kFewTiles > 0 ? Tile::kFewTiles : kAll;
  if (kMayBeWhole && is_aligned && rows.count > Tile::kRows - 16 &&
      columns.count > Tile::kColumns - 16 * Tile::kWarpColumns) {
    multiply_slices<kParts, Tile, kBySlice, kAlignedCopies, true, kAll>(of_warp, rows, columns, dim);
  } else if (kFew < kAll && is_aligned && columns.count <= 8 * Tile::kWarpColumns * kFew) {
    multiply_slices<kParts, Tile, kBySlice, kAlignedCopies, false, kFew>(of_warp, rows, columns, dim);
  } else if (is_aligned) {
    multiply_slices<kParts, Tile, kBySlice, kAlignedCopies, false, kAll>(of_warp, rows, columns, dim);
  } else {
    multiply_slices<kParts, Tile, kBySlice, Copies::elements, false, kAll>(of_warp, rows, columns, dim);
  }
  ITM_FAST_TILE_SCORES(Tile);
  ITM_FAST_UNROLLED
  for (int m = 0; m < Tile::kRowTiles; ++m) {
    if (of_warp.row_of(m) >= Tile::kRows || of_warp.row_of(m) >= rows.count) continue;
    ITM_FAST_UNROLLED
    for (int n = 0; n < Tile::kColumnTiles; ++n) {
      for (int i = 0; i < 4; ++i) {
        const Place place = mma_sum_place(lane(), i);
        scores[(of_warp.row_of(m) + place.row) * Tile::kScoreStride + of_warp.column_of(n) + place.column] =
            of_warp.sums[m][n][i];
      }
    }
  }
  barrier();
}

}  // namespace itm_fast::cuda
