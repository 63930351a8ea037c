// Forward of cross_attention_scores on the CPU.
//
// A tile is a run of whole query sets (columns) times a run of whole context sets (rows). Its raw scores are one matrix
// product whose block stays in the cache, and the epilogue turns each context set's rows into cosines at once. Nothing
// but the scores leaves the tile. The attended vector is never formed: its product with the query is `sum_k p_k s_k`
// and its squared norm `p G p` with the context set's Gram matrix G.
#pragma once

#include "itm_fast/cpu/attention.h"
#include "itm_fast/cpu/matrix.h"

namespace itm_fast::ITM_FAST_ISA {

inline constexpr int64_t kDepth = 128;                // of the shared dimension at a time
inline constexpr int64_t kDepthStride = kDepth + 16;  // keeps rows out of one another's cache sets
inline constexpr int64_t kRowsAhead = 4;              // that are fetched while a row is copied

ITM_FAST_INLINE int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Below this share of (sum_k p_k |x_k|)^2 the quadratic form p G p has lost too many digits, and the attended vector is
// formed for that query after all.
template <typename T>
inline constexpr T kCancellation = T(1) / T(512);

// Elements that one thread's tile needs.
template <typename T>
struct TileLayout {
  int64_t rows, columns;  // padded
  int64_t panels, raw, attention, context_chunk, query_norms, cosine, total;

  TileLayout(int64_t max_rows, int64_t max_columns, int64_t dim) {
    rows = round_up(max_rows, kMicroRows);
    columns = round_up(max_columns, kPanelColumns<T>);
    panels = 0;
    raw = panels + columns * dim;
    attention = raw + rows * stride();
    context_chunk = attention + rows * stride();
    query_norms = context_chunk + rows * kDepthStride;
    cosine = query_norms + columns;
    total = cosine + columns + kLanes<T>;
  }
  // One vector of padding behind each row, for loads and stores past the last query set.
  int64_t stride() const { return columns + kLanes<T>; }
};

// Gram matrix of one context set: (length, length), rows padded with zeros to a multiple of kMicroRows.
template <typename T>
inline void gram_matrix(const T* values, int64_t length, int64_t dim, T* gram) {
  dot_products(values, length, values, length, dim, gram, length);
  for (int64_t i = length * length; i < round_up(length, kMicroRows) * length; ++i) gram[i] = T(0);
}

// Packs query rows into panels of kPanelColumns columns, each (dim, columns), and takes their norms.
template <typename T>
inline void pack_queries(const T* values, int64_t n_rows, int64_t dim, T* panels, T* norms) {
  constexpr int64_t kColumns = kPanelColumns<T>;
  for (int64_t first = 0; first < n_rows; first += kColumns) {
    T* panel = panels + first * dim;
    const int64_t count = n_rows - first < kColumns ? n_rows - first : kColumns;
    for (int64_t start = 0; start < dim; start += kDepth) {
      const int64_t end = dim < start + kDepth ? dim : start + kDepth;
      for (int64_t c = 0; c < count; ++c) {
        const T* row = values + (first + c) * dim;
        for (int64_t k = start; k < end; ++k) panel[k * kColumns + c] = row[k];
      }
      for (int64_t c = count; c < kColumns; ++c) {
        for (int64_t k = start; k < end; ++k) panel[k * kColumns + c] = T(0);
      }
    }
    Vector<T> squares[kPanelVectors] = {};
    for (int64_t k = 0; k < dim; ++k) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const Vector<T> x = load(panel + k * kColumns + v * kLanes<T>);
        squares[v] += x * x;
      }
    }
    for (int v = 0; v < kPanelVectors; ++v) store<T>(norms + first + v * kLanes<T>, square_root<T>(squares[v]));
  }
}

// raw[r][c] = <context row r, query column c>, for `n_rows` rows from `values` on and all packed columns.
template <typename T>
inline void multiply_tile(const T* values, int64_t n_rows, int64_t dim, const T* panels, int64_t n_columns, T* chunk,
                          T* raw, int64_t stride) {
  const int64_t padded_rows = round_up(n_rows, kMicroRows);
  // Once even where the rows have no width: the products are zero then.
  for (int64_t start = 0; start == 0 || start < dim; start += kDepth) {
    const int64_t depth = dim - start < kDepth ? dim - start : kDepth;
    for (int64_t r = 0; r < padded_rows; ++r) {
      T* line = chunk + r * kDepthStride;
      int64_t k = 0;
      if (r < n_rows) {
        const T* row = values + r * dim + start;
        // A row's piece is too short for the hardware to foresee the next one.
        for (int64_t ahead = 0; ahead < depth; ahead += 64 / static_cast<int64_t>(sizeof(T))) {
          __builtin_prefetch(row + kRowsAhead * dim + ahead);
        }
        for (; k + kLanes<T> <= depth; k += kLanes<T>) store<T>(line + k, load(row + k));
        for (; k < depth; ++k) line[k] = row[k];
      } else {
        for (; k < depth; ++k) line[k] = T(0);
      }
    }
    for (int64_t c = 0; c < n_columns; c += kPanelColumns<T>) {
      const T* panel = panels + c * dim + start * kPanelColumns<T>;
      for (int64_t r = 0; r < padded_rows; r += kMicroRows) {
        T* block = raw + r * stride + c;
        Vector<T> tile[kMicroRows][kPanelVectors] = {};
        if (start != 0) {
#pragma GCC unroll 12
          for (int i = 0; i < kMicroRows; ++i) {
            for (int v = 0; v < kPanelVectors; ++v) tile[i][v] = load(block + i * stride + v * kLanes<T>);
          }
        }
        struct Fixed {
          constexpr operator int64_t() const { return kDepthStride; }
        };
        multiply_panel(chunk + r * kDepthStride, Fixed{}, panel, kPanelColumns<T>, depth, tile);
#pragma GCC unroll 12
        for (int i = 0; i < kMicroRows; ++i) {
          for (int v = 0; v < kPanelVectors; ++v) store<T>(block + i * stride + v * kLanes<T>, tile[i][v]);
        }
      }
    }
  }
}

// What a column's cosine needs of its attended vector c = sum_k e_k x_k, from the context vectors themselves.
template <typename T>
struct Attended {
  T square;  // |c|^2
  T dot;     // <q, c>
};

// Where `products` is given, products[k * stride] becomes <x_k, c>; `scratch` holds a vector per context then.
template <typename T>
inline Attended<T> attend_exactly(const T* column, int64_t stride, const T* context, int64_t n_contexts, int64_t dim,
                                  const T* query, T* products = nullptr, T* scratch = nullptr) {
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
    for (int64_t k = 0; k < n_contexts; ++k) attended += column[k * stride] * context[k * dim + d];
    result.square += attended * attended;
    result.dot += attended * query[d];
    for (int64_t k = 0; wanted && k < n_contexts; ++k) products[k * stride] += attended * context[k * dim + d];
  }
  for (int64_t k = 0; wanted && k < n_contexts; ++k) {
    products[k * stride] += sum_lanes<T>(load(scratch + k * kLanes<T>));
  }
  return result;
}

// The quadratic forms e G e of one panel of columns.
template <typename T>
ITM_FAST_INLINE void quadratic_forms(const T* columns, int64_t stride, const T* gram, int64_t n_contexts,
                                     Vector<T> (&squares)[kPanelVectors]) {
  for (int v = 0; v < kPanelVectors; ++v) squares[v] = Vector<T>{};
  for (int64_t r = 0; r < n_contexts; r += kMicroRows) {
    Vector<T> tile[kMicroRows][kPanelVectors] = {};
    multiply_panel(gram + r * n_contexts, n_contexts, columns, stride, n_contexts, tile);
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

// Cosines of one panel of columns with their attended vectors, `n_columns` of them from the queries `query` on.
// `attention` holds the numerators e and `totals` their sums, which cancel but for the least denominator.
template <typename T>
inline void panel_cosines(const T* raw, const T* attention, int64_t stride, const Vector<T> (&totals)[kPanelVectors],
                          const T* context, const T* gram, int64_t n_contexts, const T* query, int64_t n_columns,
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

// Scores of query sets [first_query, last_query) with context sets [first_context, last_context), written to
// scores[query * n_contexts + context]. `gram` + gram_offsets[i] is the Gram matrix of context set i; the queries have
// been packed into the workspace.
template <typename T>
inline void score_tile(const FragmentsView<T>& queries, int64_t first_query, int64_t last_query,
                       const FragmentsView<T>& contexts, int64_t first_context, int64_t last_context, const T* gram,
                       const int64_t* gram_offsets, const CrossAttentionOptions& options, const TileLayout<T>& layout,
                       T* workspace, T* scores) {
  const int64_t dim = queries.dim, stride = layout.stride();
  const int64_t column_start = queries.offsets[first_query];
  const int64_t n_columns = queries.offsets[last_query] - column_start;
  const int64_t row_start = contexts.offsets[first_context];
  const int64_t n_rows = contexts.offsets[last_context] - row_start;
  T* raw = workspace + layout.raw;
  T* logits = workspace + layout.attention;
  T* cosine = workspace + layout.cosine;
  const T* norms = workspace + layout.query_norms;
  multiply_tile(contexts.values + row_start * dim, n_rows, dim, workspace + layout.panels, n_columns,
                workspace + layout.context_chunk, raw, stride);

  for (int64_t set = first_context; set < last_context; ++set) {
    const int64_t length = contexts.length(set);
    const T* set_raw = raw + (contexts.offsets[set] - row_start) * stride;
    if (length > 0) {
      for (int64_t k = 0; k < length; ++k) {
        for (int64_t query = first_query; query < last_query; ++query) {
          const int64_t column = queries.offsets[query] - column_start;
          if (queries.length(query) > 0) {
            normalize_row(set_raw + k * stride + column, logits + k * stride + column, queries.length(query), options);
          }
        }
        for (int64_t c = n_columns; c < round_up(n_columns, kPanelColumns<T>); ++c) logits[k * stride + c] = T(0);
      }
      for (int64_t c = 0; c < n_columns; c += kPanelColumns<T>) {
        Vector<T> totals[kPanelVectors];
        for (int v = 0; v < kPanelVectors; ++v) {
          totals[v] = attend_columns(logits + c + v * kLanes<T>, stride, length, options.focal);
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
