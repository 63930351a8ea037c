// Forward of cross_attention_scores on the CPU.
//
// A tile is a run of whole query sets (columns) times a run of whole context sets (rows). Its raw scores are one matrix
// product that stays in the cache; the epilogue turns each context set's rows into cosines at once. Only scores leave
// the tile. The attended vector is not formed: its product with the query is `sum_k p_k s_k`, and its squared norm is
// `p G p` with the context set's Gram matrix G.
#pragma once

#include "itm_fast/cpu/attention.h"
#include "itm_fast/cpu/product.h"

namespace itm_fast::ITM_FAST_ISA {

// Below this share of (sum_k p_k |x_k|)^2 the quadratic form p G p has lost too many digits; the attended vector of
// that query is then formed explicitly.
template <typename T>
inline constexpr T kCancellation = T(1) / T(512);

// Scratch memory for one thread's tile, in elements of the sums' type, which has the size of a product's cell.
template <typename Product>
struct TileLayout {
  using T = typename Product::Value;
  static_assert(sizeof(typename Product::Cell) == sizeof(T));

  int64_t rows, columns;  // padded
  int64_t panel_part;     // distance between the parts of a packed operand
  int64_t panels, line, raw, attention, context_chunk, query_norms, cosine, total;

  TileLayout(int64_t max_rows, int64_t max_columns, int64_t dim) {
    // The quadratic forms read whole blocks of kMicroRows.
    rows = round_up(max_rows, Product::kBlockRows) + kMicroRows;
    columns = round_up(max_columns, kPanelColumns<T>);
    panel_part = columns * Product::cells(dim);
    panels = 0;
    line = panels + Product::kParts * panel_part;
    raw = line + Product::kParts * kDepth;
    attention = raw + rows * stride();
    context_chunk = attention + rows * stride();
    query_norms = context_chunk + Product::kParts * rows * kDepthStride;
    cosine = query_norms + columns;
    total = cosine + columns + kLanes<T>;
  }
  // One vector of padding after each row, for loads and stores past the last query set.
  int64_t stride() const { return columns + kLanes<T>; }
};

// Gram matrix of one context set: (length, length), rows padded with zeros to a multiple of kMicroRows.
template <typename T>
inline void gram_matrix(const T* values, int64_t length, int64_t dim, T* gram) {
  dot_products(values, length, values, length, dim, gram, length);
  for (int64_t i = length * length; i < round_up(length, kMicroRows) * length; ++i) gram[i] = T(0);
}

// The values for a column's cosine with its attended vector c = sum_k e_k x_k, computed from the context vectors.
template <typename T>
struct Attended {
  T square;  // |c|^2
  T dot;     // <q, c>
};

// If `products` is given, products[k * stride] becomes <x_k, c>; `scratch` then holds one vector per context.
template <typename T, typename S>
inline Attended<T> attend_exactly(const T* column, int64_t stride, const S* context, int64_t n_contexts, int64_t dim,
                                  const S* query, T* products = nullptr, T* scratch = nullptr) {
  Vector<T> squares{}, dots{};
  const bool wanted = products != nullptr;
  for (int64_t k = 0; wanted && k < n_contexts; ++k) {
    products[k * stride] = T(0);
    store<T>(scratch + k * kLanes<T>, Vector<T>{});
  }
  int64_t d = 0;
  for (; d + kLanes<T> <= dim; d += kLanes<T>) {
    Vector<T> attended{};
    for (int64_t k = 0; k < n_contexts; ++k) attended += splat(column[k * stride]) * load(context + k * dim + d);
    squares += attended * attended;
    dots += attended * load(query + d);
    for (int64_t k = 0; wanted && k < n_contexts; ++k) {
      T* sum = scratch + k * kLanes<T>;
      store<T>(sum, load(sum) + attended * load(context + k * dim + d));
    }
  }
  Attended<T> result{sum_lanes<T>(squares), sum_lanes<T>(dots)};
  for (; d < dim; ++d) {
    T attended = T(0);
    for (int64_t k = 0; k < n_contexts; ++k) attended += column[k * stride] * widen(context[k * dim + d]);
    result.square += attended * attended;
    result.dot += attended * widen(query[d]);
    for (int64_t k = 0; wanted && k < n_contexts; ++k) products[k * stride] += attended * widen(context[k * dim + d]);
  }
  for (int64_t k = 0; wanted && k < n_contexts; ++k) {
    products[k * stride] += sum_lanes<T>(load(scratch + k * kLanes<T>));
  }
  return result;
}

// The quadratic forms e G e of one panel of columns. G is symmetric: elements right of a diagonal block count twice,
// and elements left of it are skipped.
template <typename T>
ITM_FAST_INLINE void quadratic_forms(const T* columns, int64_t stride, const T* gram, int64_t n_contexts,
                                     Vector<T> (&squares)[kPanelVectors]) {
  for (int v = 0; v < kPanelVectors; ++v) squares[v] = Vector<T>{};
  for (int64_t r = 0; r < n_contexts; r += kMicroRows) {
    const int64_t right = r + kMicroRows < n_contexts ? r + kMicroRows : n_contexts;
    const T* rows = gram + r * n_contexts;
    Vector<T> tile[kMicroRows][kPanelVectors] = {};
    multiply_panel<T>(rows + right, n_contexts, columns + right * stride, stride, n_contexts - right, tile);
#pragma GCC unroll 12
    for (int i = 0; i < kMicroRows; ++i) {
      for (int v = 0; v < kPanelVectors; ++v) tile[i][v] += tile[i][v];
    }
    multiply_panel<T>(rows + r, n_contexts, columns + r * stride, stride, right - r, tile);
#pragma GCC unroll 12
    for (int i = 0; i < kMicroRows; ++i) {
      if (r + i < n_contexts) {
        for (int v = 0; v < kPanelVectors; ++v) {
          squares[v] += load(columns + (r + i) * stride + v * kLanes<T>) * tile[i][v];
        }
      }
    }
  }
}

// Whether sums of rows with weights of up to e^10 have norms far from the limits of float32; `gram` is the Gram matrix.
template <typename T>
ITM_FAST_INLINE bool has_small_rows(const T* gram, int64_t n_contexts) {
  T largest = T(0);
  for (int64_t k = 0; k < n_contexts; ++k) {
    const T square = gram[k * n_contexts + k];
    largest = square > largest ? square : largest;
  }
  return largest <= T(1e20);
}

// Cosines of one panel of columns with their attended vectors: `n_columns` columns, starting at the query `query`.
// `attention` holds the numerators e and `totals` their sums, which cancel except in the minimum denominator.
template <typename T, typename S>
inline void panel_cosines(const T* raw, const T* attention, int64_t stride, const Vector<T> (&totals)[kPanelVectors],
                          const S* context, const T* gram, int64_t n_contexts, const S* query, int64_t n_columns,
                          int64_t dim, const T* query_norms, T* cosine) {
  Vector<T> squares[kPanelVectors];
  quadratic_forms(attention, stride, gram, n_contexts, squares);
  for (int v = 0; v < kPanelVectors; ++v) {
    Vector<T> dots{}, scale{};
    for (int64_t k = 0; k < n_contexts; ++k) {
      const Vector<T> e = load(attention + k * stride + v * kLanes<T>);
      dots += e * load(raw + k * stride + v * kLanes<T>);
      scale += e * std::sqrt(gram[k * n_contexts + k]);
    }
    const Mask<T> lost = squares[v] < scale * scale * kCancellation<T>;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      const int64_t column = v * kLanes<T> + lane;
      if (lost[lane] && column < n_columns) {
        const Attended<T> exact =
            attend_exactly(attention + column, stride, context, n_contexts, dim, query + column * dim);
        squares[v][lane] = exact.square;
        dots[lane] = exact.dot;
      }
    }
    Vector<T> norms = load(query_norms + v * kLanes<T>) * square_root<T>(squares[v]) / totals[v];
    const Vector<T> least = splat(static_cast<T>(kNormEpsilon));
    norms = norms < least ? least : norms;
    store<T>(cosine + v * kLanes<T>, dots / totals[v] / norms);
  }
}

// Writes scores of query sets [first_query, last_query) with context sets [first_context, last_context) to
// scores[query * n_contexts + context]. `gram` + gram_offsets[i] is the Gram matrix of context set i; the queries are
// already packed into the workspace.
template <typename Product, typename S>
inline void score_tile(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                       const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context,
                       const typename Product::Value* gram, const int64_t* gram_offsets,
                       const CrossAttentionOptions& options, const TileLayout<Product>& layout,
                       typename Product::Value* workspace, typename Product::Value* scores) {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  const int64_t dim = queries.dim, stride = layout.stride();
  const int64_t column_start = queries.offsets[first_query];
  const int64_t n_columns = queries.offsets[last_query] - column_start;
  const int64_t row_start = contexts.offsets[first_context];
  const int64_t n_rows = contexts.offsets[last_context] - row_start;
  T* raw = workspace + layout.raw;
  T* logits = workspace + layout.attention;
  T* cosine = workspace + layout.cosine;
  const T* norms = workspace + layout.query_norms;
  multiply_tile<Product>(contexts.values + row_start * dim, dim, n_rows, dim,
                         reinterpret_cast<const Cell*>(workspace + layout.panels), layout.panel_part, n_columns,
                         reinterpret_cast<Cell*>(workspace + layout.context_chunk), raw, stride);

  const bool small_logits = has_small_logits(options);
  for (int64_t set = first_context; set < last_context; ++set) {
    const int64_t length = contexts.length(set);
    const T* set_raw = raw + (contexts.offsets[set] - row_start) * stride;
    if (length > 0) {
      for (int64_t query = first_query; query < last_query; ++query) {
        const int64_t column = queries.offsets[query] - column_start;
        if (queries.length(query) > 0) {
          normalize_rows(set_raw + column, stride, logits + column, stride, length, queries.length(query), options);
        }
      }
      for (int64_t k = 0; k < length; ++k) {
        for (int64_t c = n_columns; c < round_up(n_columns, kPanelColumns<T>); ++c) logits[k * stride + c] = T(0);
      }
      const bool no_peak = small_logits && has_small_rows(gram + gram_offsets[set], length);
      for (int64_t c = 0; c < n_columns; c += kPanelColumns<T>) {
        Vector<T> totals[kPanelVectors];
        for (int v = 0; v < kPanelVectors; ++v) {
          totals[v] = attend_columns(logits + c + v * kLanes<T>, stride, length, no_peak, options.focal);
        }
        panel_cosines(set_raw + c, logits + c, stride, totals, contexts.set_values(set), gram + gram_offsets[set],
                      length, queries.values + (column_start + c) * dim, n_columns - c, dim, norms + c, cosine + c);
      }
    }
    for (int64_t query = first_query; query < last_query; ++query) {
      const int64_t n = queries.length(query);
      T* score = scores + query * contexts.n_sets + set;
      *score = n == 0 || length == 0 ? T(0) : aggregate(cosine + queries.offsets[query] - column_start, n, options);
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
