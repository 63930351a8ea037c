// A product of 16-bit matrices that uses every wrapper of the tensor cores and of asynchronous copies. It tests the
// shim and the PTX bodies.
#pragma once

#include "itm_fast/cuda/fragments.h"
#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

inline constexpr int kProductWarps = 2, kProductRows = 16 * kProductWarps, kProductColumns = 16, kProductDepth = 32;
// Rows of shared memory are padded, as in kernels that avoid bank conflicts.
inline constexpr int kDepthStride = kProductDepth + 8, kColumnStride = kProductColumns + 8, kResultStride = 17;

struct ProductParameters {
  const uint16_t* left;          // (rows, depth)
  const uint16_t* right;         // (columns, depth), or (depth, columns) if transposed
  float* out;                    // (rows, columns)
  int64_t rows, columns, depth;  // depth is a multiple of 8; columns, too, if transposed
};

// Starts the copy of an (n_rows, width) part of a matrix; elements outside the matrix become zero.
ITM_FAST_DEVICE void copy_part(SharedArray<uint16_t> target, int64_t at, int64_t stride, const uint16_t* source,
                               int64_t first_row, int64_t first_column, int n_rows, int width, int64_t all_rows,
                               int64_t all_columns) {
  for (int i = thread_index(); i < n_rows * (width / 8); i += block_threads()) {
    const int64_t row = first_row + i / (width / 8), column = first_column + i % (width / 8) * 8;
    const int64_t left_over = row < all_rows ? all_columns - column : 0;
    const int count = left_over >= 8 ? 8 : left_over > 0 ? static_cast<int>(left_over) : 0;
    const int64_t to = at + (row - first_row) * stride + (column - first_column);
    copy_async(target, to, count > 0 ? source + row * all_columns + column : source, count);
  }
}

// Grid: one block per tile of 32 x 16 results, tiles of a strip of rows are adjacent; a warp computes 16 rows.
template <bool kTransposed, bool kHalf>
ITM_FAST_DEVICE void product(const ProductParameters& p) {
  constexpr int kLeftPart = kProductRows * kDepthStride;
  constexpr int kRightPart = kTransposed ? kProductDepth * kColumnStride : kProductColumns * kDepthStride;
  ITM_FAST_SHARED(uint16_t, left_parts, 2 * kLeftPart);
  ITM_FAST_SHARED(uint16_t, right_parts, 2 * kRightPart);
  ITM_FAST_SHARED(float, results, kProductRows* kResultStride);
  const int64_t column_tiles = (p.columns + kProductColumns - 1) / kProductColumns;
  const int64_t first_row = block_index() / column_tiles * kProductRows;
  const int64_t first_column = block_index() % column_tiles * kProductColumns;
  const int64_t slices = (p.depth + kProductDepth - 1) / kProductDepth;
  const auto copy_slice = [&](int64_t slice) {
    const int64_t depth = slice * kProductDepth, stage = slice % 2;
    copy_part(left_parts, stage * kLeftPart, kDepthStride, p.left, first_row, depth, kProductRows, kProductDepth,
              p.rows, p.depth);
    if (kTransposed) {
      copy_part(right_parts, stage * kRightPart, kColumnStride, p.right, depth, first_column, kProductDepth,
                kProductColumns, p.depth, p.columns);
    } else {
      copy_part(right_parts, stage * kRightPart, kDepthStride, p.right, first_column, depth, kProductColumns,
                kProductDepth, p.columns, p.depth);
    }
  };

  float sums[2][4] = {};
  const int matrix = lane() / 8, matrix_row = lane() % 8;
  copy_slice(0);
  commit_copies();
  for (int64_t slice = 0; slice < slices; ++slice) {
    if (slice + 1 < slices) copy_slice(slice + 1);
    commit_copies();  // An empty group after the last slice, so that one is always pending.
    wait_copies<1>();
    barrier();  // The copies of all threads are complete.
    const int64_t stage = slice % 2;
    for (int k = 0; k < kProductDepth; k += 16) {
      uint32_t a[4], b[4];
      // Matrices 0 to 3 are registers 0 to 3 of A: the upper and the lower eight rows, then the same for the
      // next columns.
      const int a_row = warp() * 16 + matrix % 2 * 8 + matrix_row;
      load_matrix(a, left_parts, stage * kLeftPart + a_row * kDepthStride + k + matrix / 2 * 8);
      // Registers 0 and 1 of B for the first eight columns, then for the next.
      if (kTransposed) {
        const int depth = k + matrix % 2 * 8 + matrix_row;
        load_matrix_transposed(b, right_parts, stage * kRightPart + depth * kColumnStride + matrix / 2 * 8);
      } else {
        const int column = matrix / 2 * 8 + matrix_row;
        load_matrix(b, right_parts, stage * kRightPart + column * kDepthStride + k + matrix % 2 * 8);
      }
      for (int half = 0; half < 2; ++half) {
        const uint32_t of_half[2] = {b[2 * half], b[2 * half + 1]};
        if (kHalf) {
          mma_fp16(sums[half], a, of_half);
        } else {
          mma_bf16(sums[half], a, of_half);
        }
      }
    }
    barrier();  // All threads have read this stage before the next copies start.
  }
  wait_copies<0>();

  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      const Place place = mma_sum_place(lane(), i);
      results[(warp() * 16 + place.row) * kResultStride + half * 8 + place.column] = sums[half][i];
    }
  }
  warp_sync();
  for (int i = lane(); i < 16 * kProductColumns; i += 32) {
    const int row = warp() * 16 + i / kProductColumns, column = i % kProductColumns;
    const float result = results[row * kResultStride + column];
    if (first_row + row < p.rows && first_column + column < p.columns) {
      p.out[(first_row + row) * p.columns + first_column + column] = result;
    }
  }
}

}  // namespace itm_fast::cuda
