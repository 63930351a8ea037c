// Shared by the steps of a tile of regulated cross-attention: weights, rows and scratch memory.
//
// All intermediates of a tile stay in the workspace of its thread. The forward keeps those of the current step only;
// the backward keeps those of all steps, and then overwrites them with the factors of its last products.
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

// Packs `values` (depth, n_columns) for products with rows of length `depth`.
template <typename Product>
inline void pack_factor(const typename Product::Value* values, int64_t depth, int64_t n_columns,
                        typename Product::Value* line, typename Product::Value* packed) {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  constexpr int64_t kColumns = kPanelColumns<T>;
  Cell* cells = reinterpret_cast<Cell*>(packed);
  const int64_t n_cells = Product::cells(depth), part = packed_size<Product>(n_columns, depth) / Product::kParts;
  for (int64_t d = 0; d < n_columns; d += kColumns) {
    Cell* panel = cells + d * n_cells;
    if (d + kColumns <= n_columns) {
      Product::pack_rows(values + d, n_columns, depth, n_cells, panel, part);
      continue;
    }
    // The last panel is not full: pack one cell at a time, from copies of its rows.
    for (int64_t cell = 0; cell < n_cells; ++cell) {
      for (int64_t half = 0; half < Product::kNumbers; ++half) {
        const int64_t k = cell * Product::kNumbers + half;
        for (int64_t c = 0; c < kColumns; ++c) {
          line[half * kColumns + c] = k < depth && d + c < n_columns ? values[k * n_columns + d + c] : T(0);
        }
      }
      Product::pack_rows(static_cast<const T*>(line), kColumns, int64_t{Product::kNumbers}, int64_t{1},
                         panel + cell * kColumns, part);
    }
  }
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

// Where the arrays of one kind begin, one per step. In the forward all steps share one array.
struct StepArrays {
  int64_t begin, distance;

  ITM_FAST_INLINE int64_t operator[](int64_t step) const { return begin + step * distance; }
};

template <typename Product>
struct RegulatorLayout {
  using T = typename Product::Value;
  static_assert(sizeof(typename Product::Cell) == sizeof(T));

  int64_t dim_stride, width_stride, hidden_stride, context_stride, query_stride;
  // Of rows: attended vectors, squared differences, changes of the channel factors, and the factors of each attention.
  StepArrays attended, squares, changes, channels, temperatures;
  StepArrays aligned, aligned_norms, hidden, narrow, local, logits, raw, attention;
  StepArrays guidance, guide;  // of pairs; guidance before each aggregation, and the last one
  int64_t scored, weighted, factors;
  int64_t context_columns, context_rows, transposed, normalized, chunk, line, total = 0;

  RegulatorLayout(const RegulatorSizes& sizes, const RegulatorOptions& options, bool keeps_steps)
      : keeps_steps_(keeps_steps) {
    constexpr int64_t kPanel = kPanelColumns<T>;
    // A product overwrites whole blocks of rows.
    const int64_t rows = sizes.rows + Product::kBlockRows;
    const int64_t n_steps = larger(options.n_alignments, options.n_correspondences);
    // A learned score needs no attended vectors after the last step.
    const int64_t n_attended = options.scored ? n_steps : n_steps + 1;
    const int64_t n_correspondences = options.n_correspondences, n_aggregations = options.n_aggregations;
    dim_stride = round_up(sizes.dim, kPanel);
    width_stride = round_up(sizes.width, kPanel);
    hidden_stride = round_up(larger(sizes.hidden, sizes.width), kPanel);
    context_stride = round_up(sizes.contexts, kPanel);
    query_stride = round_up(sizes.query_rows, kLanes<T>) + kLanes<T>;
    attended = take_steps(n_attended, rows * dim_stride);
    squares = keeps_steps ? take_steps(n_steps, rows * dim_stride) : attended;
    changes = keeps_steps ? take_steps(n_correspondences, rows * dim_stride) : attended;
    channels = take_steps(n_correspondences + 1, sizes.has_channels ? rows * dim_stride : 0);
    temperatures = take_steps(n_correspondences + 1, rows + kLanes<T>);
    aligned = take_steps(n_steps, rows * width_stride);
    aligned_norms = take_steps(n_steps, rows);
    hidden = take_steps(n_correspondences, rows * hidden_stride);
    narrow = keeps_steps ? take_steps(n_correspondences, rows * hidden_stride) : hidden;
    local = keeps_steps ? take_steps(n_aggregations, rows * hidden_stride) : hidden;
    logits = take_steps(n_aggregations, rows);
    attention = take_steps(n_attended, rows * context_stride);
    raw = keeps_steps ? take_steps(n_attended, rows * context_stride) : attention;
    guidance = take_steps(n_aggregations + 1, rows * width_stride);
    guide = take_steps(n_aggregations, rows * width_stride);
    scored = keeps_steps ? take(rows * width_stride) : guidance.begin;
    weighted = take(width_stride);
    factors = take(round_up(sizes.width, 4 * kLanes<double>));
    context_columns = take(packed_size<Product>(sizes.contexts, sizes.dim));
    context_rows = take(packed_size<Product>(sizes.dim, sizes.contexts));
    transposed = take(sizes.contexts * query_stride);
    normalized = take(sizes.contexts * query_stride);
    chunk = take(Product::kParts * rows * kDepthStride);
    line = take(larger(Product::kParts * kDepth, Product::kNumbers * kPanel));
  }

 protected:
  int64_t take(int64_t size) {
    const int64_t begin = total;
    total += round_up(size, kBiasStep);
    return begin;
  }

  StepArrays take_steps(int64_t n_steps, int64_t size) {
    if (!keeps_steps_) return {take(size), 0};
    const StepArrays arrays{total, round_up(size, kBiasStep)};
    total += n_steps * arrays.distance;
    return arrays;
  }

 private:
  bool keeps_steps_;
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

// The first `count` lanes from `source` on, at most a vector; the others are zero.
template <typename T>
ITM_FAST_INLINE Vector<T> load_some(const T* source, int64_t count) {
  if (count >= kLanes<T>) return load(source);
  T values[kLanes<T>] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = source[i];
  return load(static_cast<const T*>(values));
}

// out = a * b, element by element.
template <typename T>
ITM_FAST_INLINE void multiply_rows(const T* a, const T* b, int64_t count, T* out) {
  int64_t d = 0;
  for (; d + kLanes<T> <= count; d += kLanes<T>) store<T>(out + d, load(a + d) * load(b + d));
  for (; d < count; ++d) out[d] = a[d] * b[d];
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

// v / (|v| + 1e-8), in whole vectors. Returns |v|.
template <typename T>
ITM_FAST_INLINE T make_unit(const T* vector, int64_t count, T* unit) {
  const T norm = row_norm(vector, count), scale = T(1) / (norm + static_cast<T>(kNormEpsilon));
  for (int64_t i = 0; i < count; i += kLanes<T>) store<T>(unit + i, load(vector + i) * scale);
  return norm;
}

}  // namespace itm_fast::ITM_FAST_ISA
