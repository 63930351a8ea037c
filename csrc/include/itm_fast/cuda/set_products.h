// The products of the rows of two sets on tensor cores, tile after tile: raw scores of a pair, and Gram matrices.
//
// Sets are short, and their rows are wide. So the warps of a block share the width: each takes a quarter of every slice
// of the rows, and half of the rows of the tile. Slices of 256 bytes fill the two stages of a ring in turn:
//
//   rows      [kRows]      [kSlice of 16 bits]
//   columns   [kColumns]   [kSlice of 16 bits]
//
// Adjacent rows have their 16-byte parts in different orders, so that the eight rows of a load_matrix are in different
// banks. Groups of 16 rows or columns that a set does not have are not multiplied. The sums of the four quarters go to
// planes in shared memory, in place of the stages, and are added up in order.
//
// Rows are multiplied as in tile_product.h: those of 16 bits without conversion, float32 in three bfloat16 parts whose
// products are added up for 16 elements, then added to the sums in float32. Of products of one part, tensor cores add
// up a quarter of the width. They truncate running sums: a sum of 1024 squares loses 2^-18 of itself in the shim.
#pragma once

#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/tile_product.h"

namespace itm_fast::cuda {

struct SetTile {
  static constexpr int kRows = 64, kColumns = 64, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRowWarps = 2, kQuarters = kWarps / kRowWarps;
  static constexpr int kRowTiles = kRows / 16 / kRowWarps, kColumnTiles = kColumns / 8;  // of a warp

  static constexpr int kSlice = 128, kParts = kSlice / 8;  // of a row: units of 16 bits, and 16-byte parts
  static constexpr int kStages = 2, kStage = (kRows + kColumns) * kSlice, kStageBytes = kStages * kStage * 2;

  // Lanes of a fragment write to different banks, or two to one.
  static constexpr int kSumStride = kColumns + 8, kPlane = kRows * kSumStride, kPlaneBytes = kQuarters * kPlane * 4;
  static constexpr int kBytes = kStageBytes > kPlaneBytes ? kStageBytes : kPlaneBytes;

  // Offset of a part of a row in its stage. Columns follow the rows.
  ITM_FAST_DEVICE static int place(int row, int part) { return row * kSlice + (part ^ row % 8) * 8; }
};

#define ITM_FAST_SET_STAGES(stages) ITM_FAST_DYNAMIC_SHARED(uint16_t, stages, 0, SetTile::kStages* SetTile::kStage)
#define ITM_FAST_SET_PLANES(planes) ITM_FAST_DYNAMIC_SHARED(float, planes, 0, SetTile::kQuarters* SetTile::kPlane)

// The parts of rows in products: float32 keeps all its digits.
template <typename S>
inline constexpr int kSetParts = std::is_same_v<S, float> ? 3 : 1;

// The rows and columns of a tile.
template <typename S>
struct SetRuns {
  const S *rows, *columns;
  int n_rows, n_columns;
  int64_t dim;
};

// Copies the slices of both runs to their stages, one after another. A thread copies the same part of eight rows, 16
// apart. Elements outside of the runs become zero. `kSquare`: columns are the rows, which are copied once.
template <bool kAligned, bool kSquare, typename S>
class SetCopies {
  static constexpr int kHalves = sizeof(S) / 2;
  static constexpr int kApart = SetTile::kThreads / SetTile::kParts, kOfRows = SetTile::kRows / kApart;
  static constexpr int kOfBoth = kOfRows + SetTile::kColumns / kApart;
  static constexpr int kCopied = kSquare ? kOfRows : kOfBoth;
  static_assert(kOfBoth == 2 * kOfRows);

 public:
  ITM_FAST_DEVICE explicit SetCopies(const SetRuns<S>& runs) {
    const int row = thread_index() / SetTile::kParts, part = thread_index() % SetTile::kParts;
    const int64_t offset = row * runs.dim * kHalves + part * 8;
    rows_ = reinterpret_cast<const uint16_t*>(runs.rows) + offset;
    columns_ = reinterpret_cast<const uint16_t*>(runs.columns) + offset;
    rows_left_ = runs.n_rows - row;
    columns_left_ = runs.n_columns - row;
    step_ = static_cast<uint32_t>(kApart * runs.dim * kHalves);
    place_ = SetTile::place(row, part);
    left_ = static_cast<int>(runs.dim * kHalves) - part * 8;
  }

  // Starts copying the next slice. Nothing is read past the end of a row.
  ITM_FAST_DEVICE void start(int stage) {
    ITM_FAST_SET_STAGES(stages);
    ITM_FAST_UNROLLED
    for (int i = 0; i < kCopied; ++i) {
      const bool is_row = i % kOfRows * kApart < (i < kOfRows ? rows_left_ : columns_left_);
      const uint16_t* source = (i < kOfRows ? rows_ : columns_) + uint64_t{step_} * (i % kOfRows);
      const int target = stage * SetTile::kStage + place_ + i * kApart * SetTile::kSlice;
      if constexpr (kAligned) {
        copy_async(stages, target, source, is_row && left_ > 0 ? 8 : 0);
      } else {
        ITM_FAST_ROLLED
        for (int h = 0; h < 8; ++h) {
          uint16_t bits = 0;
          if (is_row && h < left_) __builtin_memcpy(&bits, source + h, sizeof(bits));
          stages[target + h] = bits;
        }
      }
    }
    rows_ += SetTile::kSlice;
    columns_ += SetTile::kSlice;
    left_ -= SetTile::kSlice;
  }

 private:
  const uint16_t *rows_, *columns_;  // the thread's part of the next slice, in its first row
  int rows_left_, columns_left_;     // from that row
  uint32_t step_;                    // from one of its rows to the next
  int place_, left_;                 // of the part in a stage; 16-bit units that a row still has
};

// The sums of a warp: a quarter of the width.
struct SetSums {
  float sums[SetTile::kRowTiles][SetTile::kColumnTiles][4] = {};

  ITM_FAST_DEVICE static int quarter() { return warp() % SetTile::kQuarters; }
  ITM_FAST_DEVICE static int row_of(int m) { return (warp() / SetTile::kQuarters + m * SetTile::kRowWarps) * 16; }

  ITM_FAST_DEVICE void store(int n_rows, int n_columns) const {
    ITM_FAST_SET_PLANES(planes);
    ITM_FAST_UNROLLED
    for (int m = 0; m < SetTile::kRowTiles; ++m) {
      ITM_FAST_UNROLLED
      for (int n = 0; n < SetTile::kColumnTiles; ++n) {
        if (row_of(m) >= n_rows || n * 8 >= n_columns) continue;
        for (int i = 0; i < 4; ++i) {
          const Place place = mma_sum_place(lane(), i);
          planes[quarter() * SetTile::kPlane + (row_of(m) + place.row) * SetTile::kSumStride + n * 8 + place.column] =
              sums[m][n][i];
        }
      }
    }
  }
};

// Adds the products of one stage. `rows_at` and `columns_at` are the places of the lane's first row and column.
template <int kParts, typename S>
ITM_FAST_DEVICE void add_slice(SetSums& of_warp, int rows_at, int columns_at, int n_rows, int n_columns) {
  constexpr bool kFloat = std::is_same_v<S, float>, kHalf = std::is_same_v<S, Half>;
  constexpr int kSteps = kFloat ? 1 : 2;  // of 16 elements
  ITM_FAST_SET_STAGES(stages);
  if (of_warp.row_of(0) >= n_rows) return;
  RowFragment<kParts> rows[kSteps][SetTile::kRowTiles];
  ITM_FAST_UNROLLED
  for (int i = 0; i < kSteps * SetTile::kRowTiles; ++i) {
    const int step = i % kSteps, m = i / kSteps;
    const int at = (step == 0 ? rows_at : second_step(rows_at)) + m * SetTile::kRowWarps * 16 * SetTile::kSlice;
    if constexpr (kFloat) {
      load_float_rows<SetTile>(rows[step][m], stages, at);
    } else {
      load_rows(rows[step][m], stages, at);
    }
  }
  ITM_FAST_UNROLLED
  for (int n = 0; n < SetTile::kColumnTiles; n += 2) {
    if (n * 8 >= n_columns) continue;
    ColumnFragment<kParts> columns[kSteps][2];
    ITM_FAST_UNROLLED
    for (int step = 0; step < kSteps; ++step) {
      const int at = (step == 0 ? columns_at : second_step(columns_at)) + n * 8 * SetTile::kSlice;
      if constexpr (kFloat) {
        load_float_columns(columns[step][0], stages, at);
        load_float_columns(columns[step][1], stages, at + 8 * SetTile::kSlice);
      } else {
        load_columns(columns[step][0], columns[step][1], stages, at);
      }
    }
    ITM_FAST_UNROLLED
    for (int m = 0; m < SetTile::kRowTiles; ++m) {
      if (m > 0 && of_warp.row_of(m) >= n_rows) continue;
      ITM_FAST_UNROLLED
      for (int step = 0; step < kSteps; ++step) {
        multiply_pair<kHalf, (kParts > 1)>(of_warp.sums[m][n], of_warp.sums[m][n + 1], rows[step][m], columns[step][0],
                                           columns[step][1]);
      }
    }
  }
}

template <int kParts, bool kAligned, bool kSquare, typename S>
ITM_FAST_DEVICE void add_slices(SetSums& of_warp, const SetRuns<S>& runs) {
  constexpr bool kFloat = std::is_same_v<S, float>;
  // A lane's row of the first matrices, and the part of its quarter (load_float_rows, load_rows).
  const int matrix = lane() / 8, row = lane() % 8, first_part = of_warp.quarter() * 4;
  const int rows_at = SetTile::place(of_warp.row_of(0) + row + (kFloat ? 0 : matrix % 2 * 8),
                                     first_part + (kFloat ? matrix : matrix / 2));
  const int columns_at =
      (kSquare ? 0 : SetTile::kRows * SetTile::kSlice) +
      SetTile::place(row + (kFloat ? 0 : matrix / 2 * 8), first_part + (kFloat ? matrix : matrix % 2));
  const int slices =
      static_cast<int>((runs.dim * static_cast<int64_t>(sizeof(S)) + 2 * SetTile::kSlice - 1) / (2 * SetTile::kSlice));
  SetCopies<kAligned, kSquare, S> copies(runs);
  copies.start(0);
  commit_copies();
  for (int slice = 0; slice < slices; ++slice) {
    wait_copies<0>();
    barrier();  // The copies of all threads have landed, and all are done with the stage that is filled next.
    copies.start((slice + 1) % 2);  // Zeros after the last one.
    commit_copies();
    const int stage = slice % 2 * SetTile::kStage;
    add_slice<kParts, S>(of_warp, stage + rows_at, stage + columns_at, runs.n_rows, runs.n_columns);
  }
  wait_copies<0>();
  barrier();  // The planes take the place of the stages.
}

// The products of a tile, in ITM_FAST_SET_PLANES. A separate function, so that a kernel holds one copy of it. Ends with
// a barrier. `kSquare`: rows and columns are the same.
template <int kParts, bool kSquare, typename S>
ITM_FAST_DEVICE_APART void multiply_sets(const S* rows, int n_rows, const S* columns, int n_columns, int64_t dim,
                                         bool is_aligned) {
  const SetRuns<S> runs{rows, columns, n_rows, n_columns, dim};
  SetSums of_warp;
  if (is_aligned) {
    add_slices<kParts, true, kSquare>(of_warp, runs);
  } else {
    add_slices<kParts, false, kSquare>(of_warp, runs);
  }
  of_warp.store(runs.n_rows, runs.n_columns);
  barrier();
}

// A product of the tile: the sum of its quarters.
ITM_FAST_DEVICE float product_of_planes(int row, int column) {
  ITM_FAST_SET_PLANES(planes);
  float product = 0.0f;
  for (int quarter = 0; quarter < SetTile::kQuarters; ++quarter) {
    product += planes[quarter * SetTile::kPlane + row * SetTile::kSumStride + column];
  }
  return product;
}

// Calls body(row, column, product) for all products of two sets.
template <typename S, typename Body>
ITM_FAST_DEVICE void each_product(const S* rows, int n_rows, const S* columns, int n_columns, int64_t dim,
                                  bool is_aligned, const Body& body) {
  for (int first_row = 0; first_row < n_rows; first_row += SetTile::kRows) {
    for (int first_column = 0; first_column < n_columns; first_column += SetTile::kColumns) {
      const int height = static_cast<int>(smaller(SetTile::kRows, n_rows - first_row));
      const int width = static_cast<int>(smaller(SetTile::kColumns, n_columns - first_column));
      multiply_sets<kSetParts<S>, false>(rows + first_row * dim, height, columns + first_column * dim, width, dim,
                                         is_aligned);
      for (int i = thread_index(); i < height * width; i += SetTile::kThreads) {
        const int row = i / width, column = i % width;
        body(first_row + row, first_column + column, product_of_planes(row, column));
      }
      barrier();  // The next product takes the place of this one.
    }
  }
}

}  // namespace itm_fast::cuda
