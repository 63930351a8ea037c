// Products that the backward of cross_attention_scores shares among all pairs, where most pairs have a gradient.
//
// The raw scores of a group of context sets with all queries are one matrix. It is made tile by tile, turned into its
// own gradient in place by differentiate_block, and multiplied with the queries and, transposed, with the contexts.
#pragma once

#include "itm_fast/cpu/cross_attention_backward.h"

namespace itm_fast::ITM_FAST_ISA {

// Rows of the second factor that add_rows_product packs at a time: with kPanelColumns columns they fill 32 kB.
template <typename T>
inline constexpr int64_t kProductDepth = 32768 / (kPanelColumns<T> * static_cast<int64_t>(sizeof(T)));

template <typename T>
inline constexpr int64_t kProductWorkspace = kProductDepth<T> * kPanelColumns<T> + kMicroRows * kPanelColumns<T>;

// out[r][d] += sum_k a[r * row_stride + k * depth_stride] * b[k][d] for r < n_rows, k < depth, d < dim. `b` and `out`
// have rows of dim values. One of the two strides is 1, and `a` may be read up to kMicroRows - 1 rows past its end.
template <typename T, typename S, typename RowStride, typename DepthStride>
inline void add_rows_product(const T* a, RowStride row_stride, DepthStride depth_stride, int64_t n_rows, int64_t depth,
                             const S* b, int64_t dim, T* workspace, T* out) {
  constexpr int64_t kColumns = kPanelColumns<T>;
  T* panel = workspace;
  T* rest = workspace + kProductDepth<T> * kColumns;
  for (int64_t d = 0; d < dim; d += kColumns) {
    const int64_t width = dim - d < kColumns ? dim - d : kColumns;
    for (int64_t start = 0; start < depth; start += kProductDepth<T>) {
      const int64_t count = depth - start < kProductDepth<T> ? depth - start : kProductDepth<T>;
      for (int64_t k = 0; k < count; ++k) {
        const S* row = b + (start + k) * dim + d;
        if (width == kColumns) {
          for (int v = 0; v < kPanelVectors; ++v)
            store<T>(panel + k * kColumns + v * kLanes<T>, load(row + v * kLanes<T>));
        } else {
          for (int64_t c = 0; c < kColumns; ++c) panel[k * kColumns + c] = c < width ? widen(row[c]) : T(0);
        }
      }
      for (int64_t r = 0; r < n_rows; r += kMicroRows) {
        const int64_t valid = n_rows - r < kMicroRows ? n_rows - r : kMicroRows;
        Vector<T> tile[kMicroRows][kPanelVectors] = {};
        multiply_panel<T>(a + r * row_stride + start * depth_stride, row_stride, panel, kColumns, count, tile,
                          depth_stride);
        T* target = out + r * dim + d;
        if (valid == kMicroRows && width == kColumns) {
#pragma GCC unroll 12
          for (int i = 0; i < kMicroRows; ++i) {
            for (int v = 0; v < kPanelVectors; ++v) {
              T* lanes = target + i * dim + v * kLanes<T>;
              store<T>(lanes, load(lanes) + tile[i][v]);
            }
          }
        } else {
#pragma GCC unroll 12
          for (int i = 0; i < kMicroRows; ++i) {
            for (int v = 0; v < kPanelVectors; ++v) store<T>(rest + i * kColumns + v * kLanes<T>, tile[i][v]);
          }
          for (int64_t i = 0; i < valid; ++i) {
            for (int64_t c = 0; c < width; ++c) target[i * dim + c] += rest[i * kColumns + c];
          }
        }
      }
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
