// The product of a tile: context rows times packed query columns, for several number formats.
//
// A format defines the cell of a packed operand, how a row becomes cells, and how a block of rows is multiplied with a
// panel of columns:
//   Exact<T>      cells are numbers of type T;
//   Bf16<Parts>   cells are pairs of bfloat16 along the shared dimension. One part is the rounded number. Two parts are
//                 the rounded number and the remainder; three of their four products are added up, which keeps about as
//                 many digits as float32.
// Packed columns are stored in panels of kPanelColumns, cell by cell: (cells, kPanelColumns). Rows are copied piece by
// piece into a chunk, (rows, kDepth) with a stride, so that a piece stays in the first-level cache.
#pragma once

#include <type_traits>

#include "itm_fast/cpu/matrix.h"
#if defined(ITM_FAST_AMX)
#include "itm_fast/cpu/amx.h"
#endif

namespace itm_fast::ITM_FAST_ISA {

inline constexpr int64_t kDepth = 128;                // cells of the shared dimension at a time
inline constexpr int64_t kDepthStride = kDepth + 16;  // keeps rows in different cache sets
inline constexpr int64_t kRowsAhead = 4;              // rows to prefetch while one is copied

ITM_FAST_INLINE int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A piece of an operand's rows: the cells [start, start + cells), made of the `count` numbers from `begin` on.
struct Piece {
  int64_t cells, begin, count;

  ITM_FAST_INLINE Piece(int64_t dim, int64_t n_cells, int64_t start, int64_t numbers)
      : cells(n_cells - start < kDepth ? n_cells - start : kDepth),
        begin(start * numbers),
        count(dim - begin < cells * numbers ? dim - begin : cells * numbers) {}
};

// raw += chunk * panel for one block of kMicroRows rows and the first `Vectors` vectors of the panel's columns, or
// raw = if `first`. The remaining columns become zero.
template <int Vectors, typename T, typename Cell>
ITM_FAST_INLINE void multiply_vectors(const Cell* chunk, const Cell* panel, int64_t depth, bool first, T* raw,
                                      int64_t stride) {
  Vector<T> tile[kMicroRows][Vectors] = {};
  if (!first) {
#pragma GCC unroll 12
    for (int i = 0; i < kMicroRows; ++i) {
      for (int v = 0; v < Vectors; ++v) tile[i][v] = load(raw + i * stride + v * kLanes<T>);
    }
  }
  multiply_panel<T>(chunk, Constant<kDepthStride>{}, panel, kPanelColumns<T>, depth, tile);
#pragma GCC unroll 12
  for (int i = 0; i < kMicroRows; ++i) {
    for (int v = 0; v < kPanelVectors; ++v) {
      store<T>(raw + i * stride + v * kLanes<T>, v < Vectors ? tile[i][v < Vectors ? v : 0] : Vector<T>{});
    }
  }
}

// A caption of up to kLanes words fills half a panel; compute only that half.
template <typename T, typename Cell>
ITM_FAST_INLINE void multiply_micro_block(const Cell* chunk, const Cell* panel, int64_t n_columns, int64_t depth,
                                          bool first, T* raw, int64_t stride) {
  if (n_columns <= kLanes<T>) {
    multiply_vectors<1>(chunk, panel, depth, first, raw, stride);
  } else {
    multiply_vectors<kPanelVectors>(chunk, panel, depth, first, raw, stride);
  }
}

struct NoTiles {};

template <typename T>
struct Exact {
  using Value = T;
  using Cell = T;
  using Tiles = NoTiles;                          // resource that a thread holds while it multiplies
  static constexpr int kParts = 1, kNumbers = 1;  // numbers in a cell
  static constexpr int64_t kBlockRows = kMicroRows;
  static constexpr int64_t kTileRows = 144;

  static int64_t cells(int64_t dim) { return dim; }

  template <typename S>
  ITM_FAST_INLINE static void to_cells(const S* row, int64_t count, int64_t n_cells, Cell* cells, int64_t) {
    int64_t k = 0;
    for (; k + kLanes<T> <= count; k += kLanes<T>) store<T>(cells + k, load(row + k));
    for (; k < count; ++k) cells[k] = widen(row[k]);
    for (; k < n_cells; ++k) cells[k] = Cell{};
  }

  // Converts `count` rows of a factor, `dim` apart, to cells of a panel: row k becomes depth k.
  template <typename S>
  ITM_FAST_INLINE static void pack_rows(const S* rows, int64_t dim, int64_t, int64_t n_cells, Cell* panel, int64_t) {
    for (int64_t k = 0; k < n_cells; ++k) {
      for (int v = 0; v < kPanelVectors; ++v) {
        store<T>(panel + (k * kPanelVectors + v) * kLanes<T>, load(rows + k * dim + v * kLanes<T>));
      }
    }
  }

  ITM_FAST_INLINE static void multiply_block(const Cell* chunk, int64_t, const Cell* panel, int64_t, int64_t n_columns,
                                             int64_t depth, bool first, T* raw, int64_t stride) {
    multiply_micro_block(chunk, panel, n_columns, depth, first, raw, stride);
  }
};

#if defined(__AVX512BF16__) || defined(ITM_FAST_AMX)
template <int Parts>
struct Bf16 {
  using Value = float;
  using Cell = BFloat16Pair;
  static constexpr int kParts = Parts, kNumbers = 2;
#if defined(ITM_FAST_AMX)
  using Tiles = AmxTiles;
  static constexpr int64_t kBlockRows = 2 * kAmxRows;
  static constexpr int64_t kTileRows = 288;
#else
  using Tiles = NoTiles;
  static constexpr int64_t kBlockRows = kMicroRows;
  static constexpr int64_t kTileRows = 144;
#endif
  // Whole cache lines, which are the rows of AMX tiles.
  static constexpr int64_t kLineCells = 16;

  static int64_t cells(int64_t dim) { return round_up(dim, 2 * kLineCells) / 2; }

  // Writes the first part to `cells`, a second one to `cells` + `part_stride`.
  template <typename S>
  ITM_FAST_INLINE static void to_cells(const S* row, int64_t count, int64_t n_cells, Cell* cells, int64_t part_stride) {
    auto* high = reinterpret_cast<BFloat16*>(cells);
    auto* low = reinterpret_cast<BFloat16*>(cells + part_stride);
    int64_t k = 0;
    for (; k + kLanes<float> <= count; k += kLanes<float>) {
      if constexpr (Parts == 1 && std::is_same_v<S, BFloat16>) {
        __builtin_memcpy(high + k, row + k, kLanes<float> * sizeof(S));
      } else {
        split(load(row + k), high + k, low + k);
      }
    }
    for (; k < kNumbers * n_cells; k += kLanes<float>) {
      float rest[kLanes<float>] = {};
      for (int64_t i = 0; i < kLanes<float> && k + i < count; ++i) rest[i] = widen(row[k + i]);
      split(load(static_cast<const float*>(rest)), high + k, low + k);
    }
  }

  // Converts `count` rows of a factor, `dim` apart, to cells of a panel: rows 2 k and 2 k + 1 become depth k.
  template <typename S>
  ITM_FAST_INLINE static void pack_rows(const S* rows, int64_t dim, int64_t count, int64_t n_cells, Cell* panel,
                                        int64_t part_stride) {
    for (int64_t k = 0; k < n_cells; ++k) {
      for (int v = 0; v < kPanelVectors; ++v) {
        BFloat16 halves[2][Parts][kLanes<float>];
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t row = 2 * k + half;
          const Vector<float> x = row < count ? load(rows + row * dim + v * kLanes<float>) : Vector<float>{};
          split(x, halves[half][0], halves[half][Parts - 1]);
        }
        for (int part = 0; part < Parts; ++part) {
          HalfLanes lower, upper;
          __builtin_memcpy(&lower, halves[0][part], sizeof(lower));
          __builtin_memcpy(&upper, halves[1][part], sizeof(upper));
          const FloatBits cells = __builtin_convertvector(lower, FloatBits) | __builtin_convertvector(upper, FloatBits)
                                                                                  << 16;
          __builtin_memcpy(panel + part * part_stride + (k * kPanelVectors + v) * kLanes<float>, &cells, sizeof(cells));
        }
      }
    }
  }

  ITM_FAST_INLINE static void multiply_block(const Cell* chunk, int64_t chunk_part, const Cell* panel,
                                             int64_t panel_part, [[maybe_unused]] int64_t n_columns, int64_t depth,
                                             bool first, float* raw, int64_t stride) {
#if defined(ITM_FAST_AMX)
    amx_multiply_block<Parts>(chunk, kDepthStride, chunk_part, panel, panel_part, depth, first, raw, stride);
#else
    multiply_micro_block(chunk, panel, n_columns, depth, first, raw, stride);
    if constexpr (Parts == 2) {
      multiply_micro_block(chunk, panel + panel_part, n_columns, depth, false, raw, stride);
      multiply_micro_block(chunk + chunk_part, panel, n_columns, depth, false, raw, stride);
    }
#endif
  }

 private:
  ITM_FAST_INLINE static void split(Vector<float> x, BFloat16* high, [[maybe_unused]] BFloat16* low) {
    store(high, x);
    if constexpr (Parts == 2) {
      // The remainder of an infinite number is NaN, so its products are NaN.
      store(low, x - load(static_cast<const BFloat16*>(high)));
    }
  }
};
#endif

// Packs rows as columns, into panels with parts `part_stride` cells apart. `line` holds kParts * kDepth cells.
template <typename Product, typename S>
inline void pack_columns(const S* values, int64_t n_rows, int64_t dim, int64_t part_stride,
                         typename Product::Cell* line, typename Product::Cell* panels) {
  using Cell = typename Product::Cell;
  constexpr int64_t kColumns = kPanelColumns<typename Product::Value>;
  const int64_t n_cells = Product::cells(dim);
  for (int64_t first = 0; first < n_rows; first += kColumns) {
    for (int64_t start = 0; start < n_cells; start += kDepth) {
      const Piece piece(dim, n_cells, start, Product::kNumbers);
      Cell* panel = panels + first * n_cells + start * kColumns;
      for (int64_t c = 0; c < kColumns; ++c) {
        const bool present = first + c < n_rows;
        const S* row = values + (present ? first + c : 0) * dim + piece.begin;
        Product::to_cells(row, present ? piece.count : 0, piece.cells, line, kDepth);
        for (int part = 0; part < Product::kParts; ++part) {
          Cell* target = panel + part * part_stride + c;
          for (int64_t k = 0; k < piece.cells; ++k) target[k * kColumns] = line[part * kDepth + k];
        }
      }
    }
  }
}

// pack_columns for query rows; also computes their norms.
template <typename Product, typename S>
inline void pack_queries(const S* values, int64_t n_rows, int64_t dim, int64_t part_stride,
                         typename Product::Cell* line, typename Product::Cell* panels, typename Product::Value* norms) {
  for (int64_t row = 0; row < n_rows; ++row) norms[row] = row_norm(values + row * dim, dim);
  pack_columns<Product>(values, n_rows, dim, part_stride, line, panels);
}

// raw[r][c] = <row r, column c>, for `n_rows` rows from `values` on, `row_stride` apart, and all packed columns. The
// parts of the panels are `panel_part` cells apart; the chunk holds kParts times round_up(n_rows, kBlockRows) rows.
template <typename Product, typename S>
inline void multiply_tile(const S* values, int64_t row_stride, int64_t n_rows, int64_t dim,
                          const typename Product::Cell* panels, int64_t panel_part, int64_t n_columns,
                          typename Product::Cell* chunk, typename Product::Value* raw, int64_t stride) {
  using T = typename Product::Value;
  [[maybe_unused]] typename Product::Tiles tiles{};
  const int64_t n_cells = Product::cells(dim), padded_rows = round_up(n_rows, Product::kBlockRows);
  const int64_t chunk_part = padded_rows * kDepthStride;
  // Run once even if the rows have no width: the products are zero then.
  for (int64_t start = 0; start == 0 || start < n_cells; start += kDepth) {
    const Piece piece(dim, n_cells, start, Product::kNumbers);
    for (int64_t r = 0; r < padded_rows; ++r) {
      typename Product::Cell* line = chunk + r * kDepthStride;
      const S* row = values + (r < n_rows ? r : 0) * row_stride + piece.begin;
      // A row's piece is too short for the hardware prefetcher to anticipate the next one.
      for (int64_t ahead = 0; ahead < piece.count; ahead += 64 / static_cast<int64_t>(sizeof(S))) {
        __builtin_prefetch(row + kRowsAhead * row_stride + ahead);
      }
      Product::to_cells(row, r < n_rows ? piece.count : 0, piece.cells, line, chunk_part);
    }
    for (int64_t c = 0; c < n_columns; c += kPanelColumns<T>) {
      const typename Product::Cell* panel = panels + c * n_cells + start * kPanelColumns<T>;
      for (int64_t r = 0; r < padded_rows; r += Product::kBlockRows) {
        Product::multiply_block(chunk + r * kDepthStride, chunk_part, panel, panel_part, n_columns - c, piece.cells,
                                start == 0, raw + r * stride + c, stride);
      }
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
