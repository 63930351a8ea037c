// Shared by the steps of a tile of regulated cross-attention: weights, rows and scratch memory.
//
// A tile is a run of whole query sets times a run of whole context sets. It has one row for each query row and context
// set: one slice per context set, each with the query rows in order. All intermediates of a tile stay in the workspace
// of its thread.
#pragma once

#include "itm_fast/cpu/attention.h"
#include "itm_fast/cpu/product.h"
#include "itm_fast/regulators.h"

namespace itm_fast::ITM_FAST_ISA {

ITM_FAST_INLINE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// Elements of T in a packed matrix of weights.
template <typename Product>
inline int64_t packed_size(int64_t outputs, int64_t inputs) {
  return Product::kParts * round_up(outputs, kPanelColumns<typename Product::Value>) * Product::cells(inputs);
}

// out (rows, packed columns) = rows (n_rows, depth) times packed columns. The columns of `out` are padded with zeros to
// a whole panel, and up to kBlockRows - 1 rows after its last row are overwritten.
template <typename Product>
inline void multiply_packed(const typename Product::Value* rows, int64_t row_stride, int64_t n_rows, int64_t depth,
                            const typename Product::Value* packed, int64_t n_columns, typename Product::Value* chunk,
                            typename Product::Value* out, int64_t stride) {
  using Cell = typename Product::Cell;
  multiply_tile<Product>(rows, row_stride, n_rows, depth, reinterpret_cast<const Cell*>(packed),
                         packed_size<Product>(n_columns, depth) / Product::kParts, n_columns,
                         reinterpret_cast<Cell*>(chunk), out, stride);
}

template <typename Product>
struct RegulatorLayout {
  using T = typename Product::Value;
  static_assert(sizeof(typename Product::Cell) == sizeof(T));

  int64_t dim_stride, width_stride, hidden_stride, context_stride, query_stride;
  int64_t wide, channels, temperatures, aligned, hidden, guidance, guide, logits, factors;
  int64_t context_columns, context_rows, scores, transposed, normalized, chunk, line, total;

  explicit RegulatorLayout(const RegulatorSizes& sizes) {
    constexpr int64_t kPanel = kPanelColumns<T>;
    // A product overwrites whole blocks of rows.
    const int64_t rows = sizes.rows + Product::kBlockRows;
    dim_stride = round_up(sizes.dim, kPanel);
    width_stride = round_up(sizes.width, kPanel);
    hidden_stride = round_up(larger(sizes.hidden, sizes.width), kPanel);
    context_stride = round_up(sizes.contexts, kPanel);
    query_stride = round_up(sizes.query_rows, kLanes<T>) + kLanes<T>;
    int64_t end = 0;
    const auto take = [&end](int64_t size) {
      const int64_t begin = end;
      end += round_up(size, kBiasStep);
      return begin;
    };
    wide = take(rows * dim_stride);
    channels = take(sizes.has_channels ? rows * dim_stride : 0);
    temperatures = take(rows + kLanes<T>);
    aligned = take(rows * width_stride);
    hidden = take(rows * hidden_stride);
    guidance = take(rows * width_stride);
    guide = take(rows * width_stride);
    logits = take(rows);
    factors = take(round_up(sizes.width, 4 * kLanes<double>));
    context_columns = take(packed_size<Product>(sizes.contexts, sizes.dim));
    context_rows = take(packed_size<Product>(sizes.dim, sizes.contexts));
    scores = take(rows * context_stride);
    transposed = take(sizes.contexts * query_stride);
    normalized = take(sizes.contexts * query_stride);
    chunk = take(Product::kParts * rows * kDepthStride);
    line = take(larger(Product::kParts * kDepth, Product::kNumbers * kPanel));
    total = end;
  }
};

// out = tanh(rows weight^T + bias).
template <typename Product>
inline void hidden_layer(const typename Product::Value* rows, int64_t row_stride, int64_t n_rows,
                         const RegulatorLayer<typename Product::Value>& layer, typename Product::Value* chunk,
                         typename Product::Value* out, int64_t stride) {
  using T = typename Product::Value;
  multiply_packed<Product>(rows, row_stride, n_rows, layer.inputs, layer.packed, layer.outputs, chunk, out, stride);
  for (int64_t r = 0; r < n_rows; ++r) {
    T* row = out + r * stride;
    for (int64_t i = 0; i < layer.outputs; i += kLanes<T>) {
      store<T>(row + i, tanh_vector(load(row + i) + load(layer.bias + i)));
    }
  }
}

// <a, b> of `count` numbers.
template <typename T>
ITM_FAST_INLINE T dot(const T* a, const T* b, int64_t count) {
  Vector<T> sums{};
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) sums += load(a + i) * load(b + i);
  T sum = sum_lanes<T>(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// v / (|v| + 1e-8), in whole vectors.
template <typename T>
ITM_FAST_INLINE void make_unit(T* vector, int64_t count) {
  const T scale = T(1) / (row_norm(vector, count) + static_cast<T>(kNormEpsilon));
  for (int64_t i = 0; i < count; i += kLanes<T>) store<T>(vector + i, load(vector + i) * scale);
}

}  // namespace itm_fast::ITM_FAST_ISA
