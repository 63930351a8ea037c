// Small matrix products for the CPU kernels.
//
// Three shapes: `multiply_panel` (a register tile of a large product with one packed operand), `dot_products` (both
// operands row by row along the shared dimension) and `add_product` (a small matrix times rows, added to rows).
#pragma once

#include <type_traits>

#include "itm_fast/cpu/simd.h"

namespace itm_fast::ITM_FAST_ISA {

inline constexpr int kPanelVectors = 2;
template <typename T>
inline constexpr int kPanelColumns = kPanelVectors * kLanes<T>;

ITM_FAST_INLINE void multiply_add(Vector<float>& sum, Vector<float> x, Vector<float> y) { sum += x * y; }
ITM_FAST_INLINE void multiply_add(Vector<double>& sum, Vector<double> x, Vector<double> y) { sum += x * y; }

#if defined(__AVX512BF16__)
typedef uint32_t PairLanes __attribute__((vector_size(kVectorBytes)));

ITM_FAST_INLINE PairLanes load(const BFloat16Pair* source) {
  PairLanes value;
  __builtin_memcpy(&value, source, sizeof(value));
  return value;
}

ITM_FAST_INLINE PairLanes splat(BFloat16Pair pair) { return PairLanes{} + pair.bits; }

// Adds both products of each pair.
ITM_FAST_INLINE void multiply_add(Vector<float>& sum, PairLanes x, PairLanes y) {
  sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#endif

// A stride known at compile time.
template <int64_t Value>
struct Constant {
  constexpr operator int64_t() const { return Value; }
};

// tile[r][v] += sum_k a[r * row_stride + k * depth_stride] * b[k * b_stride + v * lanes], r < kMicroRows. Cells are
// numbers of type T, or pairs of them along k. Strides may be constants.
template <typename T, int Vectors, typename Cell, typename RowStride, typename DepthStride = Constant<1>>
ITM_FAST_INLINE void multiply_panel(const Cell* a, RowStride row_stride, const Cell* b, int64_t b_stride, int64_t depth,
                                    Vector<T> (&tile)[kMicroRows][Vectors], DepthStride depth_stride = {}) {
  static_assert(Vectors == 1 || Vectors == 2);
  for (int64_t k = 0; k < depth; ++k) {
    const auto b0 = load(b), b1 = load(b + (Vectors - 1) * kLanes<T>);
#pragma GCC unroll 12
    for (int r = 0; r < kMicroRows; ++r) {
      const auto x = splat(a[r * row_stride]);
      multiply_add(tile[r][0], x, b0);
      if constexpr (Vectors == 2) multiply_add(tile[r][1], x, b1);
    }
    a += depth_stride;
    b += b_stride;
  }
}

// The Euclidean norm of one row.
template <typename S>
ITM_FAST_INLINE auto row_norm(const S* row, int64_t dim) {
  using V = decltype(load(row));
  using T = std::remove_cvref_t<decltype(V{}[0])>;
  V sums[4] = {};
  int64_t d = 0;
  for (; d + 4 * kLanes<T> <= dim; d += 4 * kLanes<T>) {
    for (int v = 0; v < 4; ++v) {
      const V x = load(row + d + v * kLanes<T>);
      sums[v] += x * x;
    }
  }
  T total = sum_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; d < dim; ++d) {
    const T x = widen(row[d]);
    total += x * x;
  }
  return std::sqrt(total);
}

// out[r * out_stride + c] = <a row r, b row c> for `rows` x `columns` rows of `dim` values.
template <typename T, int C>
ITM_FAST_INLINE void dot_block(const T* const (&a)[4], const T* b, int64_t dim, T (&out)[4][C]) {
  Vector<T> sums[4][C] = {};
  int64_t k = 0;
  for (; k + kLanes<T> <= dim; k += kLanes<T>) {
    Vector<T> x[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) x[r] = load(a[r] + k);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vector<T> y = load(b + c * dim + k);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[r][c] += x[r] * y;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      T sum = sum_lanes<T>(sums[r][c]);
      for (int64_t tail = k; tail < dim; ++tail) sum += a[r][tail] * b[c * dim + tail];
      out[r][c] = sum;
    }
  }
}

template <typename T, int C>
ITM_FAST_INLINE void dot_strip(const T* const (&a)[4], int64_t valid_rows, const T* b, int64_t dim, T* out,
                               int64_t out_stride) {
  T block[4][C];
  dot_block<T, C>(a, b, dim, block);
  for (int64_t r = 0; r < valid_rows; ++r) {
    for (int c = 0; c < C; ++c) out[r * out_stride + c] = block[r][c];
  }
}

template <typename T>
inline void dot_products(const T* a, int64_t rows, const T* b, int64_t columns, int64_t dim, T* out,
                         int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += 4) {
    const int64_t valid = rows - r < 4 ? rows - r : 4;
    // Rows past the end repeat the last one; their results are not stored.
    const T* lines[4];
    for (int64_t i = 0; i < 4; ++i) lines[i] = a + (r + (i < valid ? i : valid - 1)) * dim;
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4)
      dot_strip<T, 4>(lines, valid, b + c * dim, dim, out + r * out_stride + c, out_stride);
    switch (columns - c) {
      case 3:
        dot_strip<T, 3>(lines, valid, b + c * dim, dim, out + r * out_stride + c, out_stride);
        break;
      case 2:
        dot_strip<T, 2>(lines, valid, b + c * dim, dim, out + r * out_stride + c, out_stride);
        break;
      case 1:
        dot_strip<T, 1>(lines, valid, b + c * dim, dim, out + r * out_stride + c, out_stride);
        break;
      default:
        break;
    }
  }
}

// Columns that add_product processes at a time.
template <typename T>
inline constexpr int kStripColumns = 4 * kLanes<T>;

// out rows r < R: out[r][d] += sum_j a[r * row_stride + j * column_stride] * b[j][d] for the columns of one strip.
template <typename T, int R>
ITM_FAST_INLINE void add_product_rows(const T* a, int64_t row_stride, int64_t column_stride, int64_t depth, const T* b,
                                      int64_t dim, T* out) {
  int64_t d = 0;
  for (; d + kStripColumns<T> <= dim; d += kStripColumns<T>) {
    Vector<T> sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = load(out + r * dim + d + v * kLanes<T>);
    }
    for (int64_t j = 0; j < depth; ++j) {
      Vector<T> line[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) line[v] = load(b + j * dim + d + v * kLanes<T>);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector<T> x = splat(a[r * row_stride + j * column_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sums[r][v] += x * line[v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) store<T>(out + r * dim + d + v * kLanes<T>, sums[r][v]);
    }
  }
  for (; d < dim; ++d) {
    for (int r = 0; r < R; ++r) {
      T sum = out[r * dim + d];
      for (int64_t j = 0; j < depth; ++j) sum += a[r * row_stride + j * column_stride] * b[j * dim + d];
      out[r * dim + d] = sum;
    }
  }
}

// out[r][d] += sum_j a[r * row_stride + j * column_stride] * b[j][d] for r < rows, j < depth, d < dim.
template <typename T>
inline void add_product(const T* a, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t depth, const T* b,
                        int64_t dim, T* out) {
  constexpr int kRows = kVectorBytes == 64 ? 6 : 2;  // times 4 accumulators, of 32 or 16 registers
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    add_product_rows<T, kRows>(a + r * row_stride, row_stride, column_stride, depth, b, dim, out + r * dim);
  }
  for (; r < rows; ++r) {
    add_product_rows<T, 1>(a + r * row_stride, row_stride, column_stride, depth, b, dim, out + r * dim);
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
