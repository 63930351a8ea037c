// maxsim_scores on the CPU.
//
// Query rows are packed as columns. Context rows are multiplied with them in tiles that may begin and end inside a set;
// the maximum per column is carried from tile to tile. Only scores, or the indices of the maxima, leave a tile.
#pragma once

#include "cpu/kernels/lanes.h"
#include "cpu/kernels/maxsim.h"
#include "itm_fast/cpu/product.h"

namespace itm_fast::ITM_FAST_ISA {

// Scratch memory of one thread, in elements of the sums' type, which has the size of a product's cell.
template <typename Product>
struct MaxsimLayout {
  using T = typename Product::Value;
  static_assert(sizeof(typename Product::Cell) == sizeof(T));

  int64_t columns, panel_part, panels, line, raw, chunk, best, index, total;

  MaxsimLayout(int64_t max_columns, int64_t dim) {
    columns = round_up(max_columns, kPanelColumns<T>);
    panel_part = columns * Product::cells(dim);
    panels = 0;
    line = panels + Product::kParts * panel_part;
    raw = line + Product::kParts * kDepth;
    chunk = raw + round_up(Product::kTileRows, Product::kBlockRows) * stride();
    best = chunk + Product::kParts * round_up(Product::kTileRows, Product::kBlockRows) * kDepthStride;
    index = best + columns;
    total = index + columns;
  }
  // One vector of padding after each row, for loads past the last query set.
  int64_t stride() const { return columns + kLanes<T>; }
};

// NaN replaces any number, and nothing replaces NaN; of equal values, the first stays.
template <typename T>
ITM_FAST_INLINE Mask<T> replaces(Vector<T> value, Vector<T> best) {
  return (value > best) | ((value != value) & (best == best));
}

template <typename T>
ITM_FAST_INLINE bool replaces(T value, T best) {
  return value > best || (value != value && best == best);
}

template <typename T>
ITM_FAST_INLINE T lowest() {
  return -static_cast<T>(__builtin_inf());
}

// The maximum per column: best[c] becomes the maximum of best[c] and raw[r][c] over the rows. With `index`, it becomes
// `first_row` plus the row of a new maximum.
template <bool kIndex, typename T>
ITM_FAST_INLINE void fold_columns(const T* raw, int64_t stride, int64_t n_rows, int64_t n_columns, T* best,
                                  [[maybe_unused]] LaneInteger<T>* index, [[maybe_unused]] int64_t first_row) {
  for (int64_t c = 0; c < n_columns; c += kLanes<T>) {
    Vector<T> top = load(best + c);
    [[maybe_unused]] Mask<T> place;
    if constexpr (kIndex) __builtin_memcpy(&place, index + c, sizeof(place));
    for (int64_t r = 0; r < n_rows; ++r) {
      const Vector<T> value = load(raw + r * stride + c);
      const Mask<T> taken = replaces<T>(value, top);
      top = select<T>(taken, value, top);
      if constexpr (kIndex) place = taken ? Mask<T>{} + static_cast<LaneInteger<T>>(first_row + r) : place;
    }
    store<T>(best + c, top);
    if constexpr (kIndex) __builtin_memcpy(index + c, &place, sizeof(place));
  }
}

// The maximum of `count` numbers; a vector may be read past them.
template <typename T>
ITM_FAST_INLINE T row_maximum(const T* row, int64_t count) {
  const Vector<T> none = splat(lowest<T>());
  Vector<T> top = none;
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    const Vector<T> value = select<T>(first_lanes<T>(count - c), load(row + c), none);
    top = select<T>(replaces<T>(value, top), value, top);
  }
  T result = top[0];
  for (int i = 1; i < kLanes<T>; ++i) {
    if (replaces<T>(top[i], result)) result = top[i];
  }
  return result;
}

template <typename Product, typename S>
struct MaxsimBy {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  using Layout = MaxsimLayout<Product>;

  static int64_t workspace(int64_t max_columns, int64_t dim) { return Layout(max_columns, dim).total; }

  static void pack(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query, int64_t max_columns,
                   T* workspace) {
    const Layout layout(max_columns, queries.dim);
    pack_columns<Product>(queries.set_values(first_query), queries.offsets[last_query] - queries.offsets[first_query],
                          queries.dim, layout.panel_part, reinterpret_cast<Cell*>(workspace + layout.line),
                          reinterpret_cast<Cell*>(workspace + layout.panels));
  }

  // raw = products of the context rows [row, row + n_rows) with the packed columns
  ITM_FAST_INLINE static void multiply(const FragmentsView<S>& contexts, int64_t row, int64_t n_rows, int64_t n_columns,
                                       const Layout& layout, T* workspace) {
    multiply_tile<Product>(contexts.values + row * contexts.dim, contexts.dim, n_rows, contexts.dim,
                           reinterpret_cast<const Cell*>(workspace + layout.panels), layout.panel_part, n_columns,
                           reinterpret_cast<Cell*>(workspace + layout.chunk), workspace + layout.raw, layout.stride());
  }

  static void score(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                    const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context,
                    MaxsimOptions options, int64_t max_columns, T* workspace, double* sums, T* scores, int64_t stride) {
    const Layout layout(max_columns, queries.dim);
    const int64_t start = queries.offsets[first_query], n_columns = queries.offsets[last_query] - start;
    const T* raw = workspace + layout.raw;
    T* best = workspace + layout.best;
    int64_t ready = contexts.offsets[first_context], begin = ready;  // rows [begin, ready) are in the tile
    for (int64_t set = first_context; set < last_context; ++set) {
      const int64_t length = contexts.length(set), end = contexts.offsets[set + 1];
      for (int64_t c = 0; c < layout.columns; ++c) best[c] = lowest<T>();
      for (int64_t q = 0; q < last_query - first_query; ++q) sums[q] = 0;
      for (int64_t row = contexts.offsets[set]; row < end;) {
        if (row == ready) {
          const int64_t left = contexts.offsets[last_context] - row;
          begin = row;
          ready = row + (left < Product::kTileRows ? left : Product::kTileRows);
          multiply(contexts, begin, ready - begin, n_columns, layout, workspace);
        }
        const int64_t n_rows = (end < ready ? end : ready) - row;
        const T* rows = raw + (row - begin) * layout.stride();
        if (options.by_queries()) {
          fold_columns<false>(rows, layout.stride(), n_rows, n_columns, best, static_cast<LaneInteger<T>*>(nullptr), 0);
        }
        for (int64_t query = first_query; options.by_contexts() && query < last_query; ++query) {
          const T* line = rows + queries.offsets[query] - start;
          for (int64_t r = 0; r < n_rows; ++r) {
            sums[query - first_query] += row_maximum(line + r * layout.stride(), queries.length(query));
          }
        }
        row += n_rows;
      }
      for (int64_t query = first_query; query < last_query; ++query) {
        const int64_t n = queries.length(query);
        const bool mean = options.reduction == MaxsimReduction::mean;
        double total = 0;
        for (int64_t j = 0; options.by_queries() && j < n; ++j) total += best[queries.offsets[query] - start + j];
        if (mean) total = total / n + sums[query - first_query] / length;
        if (!mean) total += sums[query - first_query];
        scores[(query - first_query) * stride + set - first_context] = n == 0 || length == 0 ? T(0) : T(total);
      }
    }
  }

  static void match(const FragmentsView<S>& queries, int64_t query, const FragmentsView<S>& contexts, int64_t context,
                    int64_t max_columns, T* workspace, int32_t* by_query, int32_t* by_context) {
    const Layout layout(max_columns, queries.dim);
    const int64_t n_columns = queries.length(query), length = contexts.length(context);
    const T* raw = workspace + layout.raw;
    T* best = workspace + layout.best;
    auto* index = reinterpret_cast<LaneInteger<T>*>(workspace + layout.index);
    for (int64_t c = 0; c < layout.columns; ++c) {
      best[c] = lowest<T>();
      index[c] = 0;
    }
    for (int64_t row = 0; row < length; row += Product::kTileRows) {
      const int64_t n_rows = length - row < Product::kTileRows ? length - row : Product::kTileRows;
      multiply(contexts, contexts.offsets[context] + row, n_rows, n_columns, layout, workspace);
      if (by_query != nullptr) fold_columns<true>(raw, layout.stride(), n_rows, n_columns, best, index, row);
      for (int64_t r = 0; by_context != nullptr && r < n_rows; ++r) {
        const T* line = raw + r * layout.stride();
        int32_t top = 0;
        for (int64_t c = 1; c < n_columns; ++c) {
          if (replaces<T>(line[c], line[top])) top = static_cast<int32_t>(c);
        }
        by_context[row + r] = top;
      }
    }
    for (int64_t j = 0; by_query != nullptr && j < n_columns; ++j) by_query[j] = static_cast<int32_t>(index[j]);
  }

  static void add_matches(const int32_t* matches, int64_t count, bool scatter, T weight, const S* rows, int64_t dim,
                          T* gradient) {
    for (int64_t i = 0; i < count; ++i) {
      const S* row = rows + (scatter ? i : matches[i]) * dim;
      T* out = gradient + (scatter ? matches[i] : i) * dim;
      int64_t d = 0;
      for (; d + kLanes<T> <= dim; d += kLanes<T>) store<T>(out + d, load(out + d) + splat(weight) * load(row + d));
      for (; d < dim; ++d) out[d] += weight * widen(row[d]);
    }
  }

  static constexpr MaxsimKernels<S, T> kTable{workspace, pack, score, match, add_matches};
};

}  // namespace itm_fast::ITM_FAST_ISA
