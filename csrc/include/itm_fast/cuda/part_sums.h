// Sums of rows on tensor cores, each with its own coefficients: sum_t A_t' B_t of matrices A_t (depth of t, rows of the
// result) in bfloat16 parts (part_matrix.h) and runs of rows B_t (depth of t, columns). B_t has the type S; the terms
// may be anywhere in global memory. The gradient of a set's rows is such a sum, with a term for every pair of the set.
// So are the attended vectors of a long set, with one term.
//
// A block computes kRows x kColumns of the result; each warp owns some columns, and all rows or half of them.
// Coefficients have three parts for rows of float32, else two unless the tile has three. Rows are split into parts in
// registers: three parts of float32, two of float16, which are exact, one of bfloat16. Products of a step are added up
// separately, then added to the sums in float32. Sums of bfloat16 rows with two parts do without: a list of 1,000 pairs
// is off by 2^-12 at most, and the result has 8 bits.
#pragma once

#include "itm_fast/cuda/part_steps.h"

namespace itm_fast::cuda {

#define ITM_FAST_PART_SUMS(sums) ITM_FAST_DYNAMIC_SHARED(float, sums, 0, PartTile<float>::kSums)

// The sums of a warp: its share of the rows and columns of a tile.
template <typename Tile>
struct WarpPartSums {
  float sums[Tile::kRowTiles][Tile::kColumnTiles][4] = {};
  int warp, lane;

  ITM_FAST_DEVICE explicit WarpPartSums(int thread) : warp(thread / 32), lane(thread % 32) {}
  // The first column of a tile of columns, from the first of the block.
  ITM_FAST_DEVICE int column_of(int n) const {
    const int share = Tile::kRowWarps > 1 ? warp % Tile::kColumnWarps : warp;
    return (share * Tile::kColumnTiles + n) * 8;
  }
  ITM_FAST_DEVICE int row_of(int m) const {
    const int share = Tile::kRowWarps > 1 ? warp / Tile::kColumnWarps : 0;
    return (share * Tile::kRowTiles + m) * 16;
  }

  // Calls body(row, column, sum) for the tiles of 16 rows and 8 columns that reach into the range.
  template <typename Body>
  ITM_FAST_DEVICE void each(int n_rows, int n_columns, const Body& body) const {
    ITM_FAST_UNROLLED
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ITM_FAST_UNROLLED
      for (int n = 0; n < Tile::kColumnTiles; ++n) {
        if (row_of(m) >= n_rows || column_of(n) >= n_columns) continue;
        ITM_FAST_UNROLLED
        for (int i = 0; i < 4; ++i) {
          const Place place = mma_sum_place(lane, i);
          body(row_of(m) + place.row, column_of(n) + place.column, sums[m][n][i]);
        }
      }
    }
  }
};

// Fragments of kTogether tiles of columns, 16 depths each.
template <typename Tile>
using StepColumns = ColumnFragment<Tile::kRowParts>[Tile::kTogether];

// Loads those of the tiles from `tile` and the depths from `depth`.
template <typename Tile>
ITM_FAST_DEVICE void load_columns_of_step(StepColumns<Tile>& columns, int stage, int depth, int first_column,
                                          int lane) {
  ITM_FAST_DYNAMIC_SHARED(typename Tile::Unit, rows, Tile::kRowsAt, Tile::kRing * Tile::kRowStage);
  const int first = stage * Tile::kRowStage + depth * Tile::kRowStride + first_column;
  if constexpr (Tile::kFloat) {
    const int at = first + lane % 4 * 2 * Tile::kRowStride + lane / 4;
    ITM_FAST_UNROLLED
    for (int i = 0; i < 2 * Tile::kTogether; ++i) {
      const int place = at + i / 2 * 8 + i % 2 * 8 * Tile::kRowStride;
      uint32_t parts[Tile::kRowParts];
      split_floats(rows[place], rows[place + Tile::kRowStride], parts);
      for (int part = 0; part < Tile::kRowParts; ++part) columns[i / 2].parts[part][i % 2] = parts[part];
    }
  } else {
    constexpr int kMatrices = Tile::kSplit ? Tile::kRowParts : 1;
    const int at = first + lane % 16 * Tile::kRowStride + lane / 16 * 8;
    ITM_FAST_UNROLLED
    for (int i = 0; i < Tile::kTogether / 2 * kMatrices; ++i) {
      const int n = i / kMatrices * 2, matrix = i % kMatrices;
      uint32_t loaded[4];
      load_matrix_transposed(loaded, rows, at + n * 8 + matrix * Tile::kColumns);
      ITM_FAST_UNROLLED
      for (int j = 0; j < 4; ++j) {
        ColumnFragment<Tile::kRowParts>& column = columns[n + j / 2];
        if constexpr (std::is_same_v<typename Tile::Row, Half>) {
          uint32_t parts[Tile::kRowParts];
          split_floats(fp16_value(static_cast<uint16_t>(loaded[j])), fp16_value(static_cast<uint16_t>(loaded[j] >> 16)),
                       parts);
          for (int part = 0; part < Tile::kRowParts; ++part) column.parts[part][j % 2] = parts[part];
        } else {
          column.parts[matrix][j % 2] = loaded[j];
        }
      }
    }
  }
}

// Adds the products of 16 rows and kTogether tiles of columns, those of the smallest parts first.
template <typename Tile>
ITM_FAST_DEVICE void multiply_step(float (*sums)[4], const RowFragment<Tile::kParts> (&rows)[2],
                                   const StepColumns<Tile> (&columns)[2]) {
  constexpr int kParts = Tile::kParts, kRowParts = Tile::kRowParts, kTogether = Tile::kTogether;
  float of_step[kTogether][4] = {};
  ITM_FAST_UNROLLED
  for (int order = kParts + kRowParts - 2; order >= 0; --order) {
    if (order >= (kParts > kRowParts ? kParts : kRowParts)) continue;
    ITM_FAST_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      if (part > order || order - part >= kRowParts) continue;
      ITM_FAST_UNROLLED
      for (int i = 0; i < 2 * kTogether; ++i) {
        const int half = i / kTogether, n = i % kTogether;
        multiply_parts<false>(Tile::kByStep ? of_step[n] : sums[n], rows[half], columns[half][n], part, order - part);
      }
    }
  }
  if constexpr (Tile::kByStep) {
    ITM_FAST_UNROLLED
    for (int n = 0; n < kTogether; ++n) {
      for (int i = 0; i < 4; ++i) sums[n][i] += of_step[n][i];
    }
  }
}

// Adds the products of a step.
template <typename Tile>
ITM_FAST_DEVICE void add_step(WarpPartSums<Tile>& sums, int stage, int n_rows) {
  constexpr int kParts = Tile::kParts;
  ITM_FAST_DYNAMIC_SHARED(uint16_t, coefficients, 0, Tile::kRing* Tile::kCoefficients);
  // Register i of a fragment: rows 8 (i % 2) and up, depths 8 (i / 2) and up.
  const int lane = sums.lane;
  const int at = stage * Tile::kCoefficients + (lane / 16 * 8 + lane % 8) * Tile::kCoefficientStride + lane / 8 % 2 * 8;
  ITM_FAST_UNROLLED
  for (int n = 0; n < Tile::kColumnTiles; n += Tile::kTogether) {
    StepColumns<Tile> columns[2];
    for (int half = 0; half < 2; ++half) {
      load_columns_of_step<Tile>(columns[half], stage, half * 16, sums.column_of(n), lane);
    }
    ITM_FAST_UNROLLED
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      if (sums.row_of(m) >= n_rows) break;
      RowFragment<kParts> rows[2];
      ITM_FAST_UNROLLED
      for (int i = 0; i < 2 * kParts; ++i) {
        load_matrix_transposed(
            rows[i / kParts].parts[i % kParts], coefficients,
            at + i / kParts * 16 * Tile::kCoefficientStride + i % kParts * Tile::kRows + sums.row_of(m));
      }
      multiply_step<Tile>(sums.sums[m] + n, rows, columns);
    }
  }
}

// Adds the listed granules, `count` of them. For all threads of the block; ends with a barrier.
template <typename Tile, typename Copies>
ITM_FAST_DEVICE void add_granules(WarpPartSums<Tile>& sums, const Copies& copies, int count, int n_rows,
                                  int n_columns) {
  constexpr int kRing = Tile::kRing, kAhead = kRing - 1, kOfStep = Tile::kDepth / Tile::kGranule;
  const int steps = (count + kOfStep - 1) / kOfStep;
  const bool multiplies = sums.column_of(0) < n_columns && (Tile::kRowWarps == 1 || sums.row_of(0) < n_rows);
  for (int step = 0; step < kAhead; ++step) {
    if (step < steps) copies.start(step, step);
    commit_copies();
  }
  int multiplied = 0, filled = kAhead;  // the stages that are used and filled next
  for (int step = 0; step < steps; ++step) {
    wait_copies<kRing - 2>();
    barrier();  // All copies have landed, and all threads are done with the stage that is filled next.
    if (step + kAhead < steps) copies.start(step + kAhead, filled);
    commit_copies();  // An empty group counts, too: the number of pending groups stays the same.
    if (multiplies) add_step(sums, multiplied, n_rows);
    filled = multiplied;
    multiplied = multiplied + 1 < kRing ? multiplied + 1 : 0;
  }
  wait_copies<0>();
  barrier();  // The stages and the table are filled again, or replaced by the sums.
}

// Writes the granules of the terms to the table, from granule `begin` of all: those of the lane's term start at
// `start`. The last step is filled up with empty ones.
template <typename Tile, typename S>
ITM_FAST_DEVICE void list_granules(const PartTerm<S>& term, const PartRange& range, int start, int begin, int count) {
  ITM_FAST_GRANULES(granules);
  const int64_t row_stride = int64_t{Tile::kSplit ? Tile::kRowParts : 1} * range.row_stride;
  for (int depth = warp() * Tile::kGranule; depth < term.depth; depth += Tile::kWarps * Tile::kGranule) {
    const int at = start + depth / Tile::kGranule - begin;
    if (at < 0 || at >= count) continue;
    granules[at] = Granule<S>{term.coefficients + int64_t{depth} * Tile::kParts * range.coefficient_stride,
                              term.rows + depth * row_stride, term.depth - depth};
  }
  if (thread_index() > 0) return;
  for (; count % (Tile::kDepth / Tile::kGranule) != 0; ++count) {
    granules[count] = Granule<S>{term.coefficients, term.rows, 0};
  }
}

// Adds the terms term_at(entry), for entries from `first` up to `end`. Each lane looks up a term, so that the loads of
// 32 terms overlap. For all threads of the block; ends with a barrier. `thread`: its index.
template <bool kAligned, typename Tile, typename TermAt>
ITM_FAST_DEVICE void add_terms(WarpPartSums<Tile>& sums, const PartRange& range, int32_t first, int32_t end,
                               const TermAt& term_at, int thread) {
  const GranuleCopies<kAligned, Tile> copies(range, thread);
  const int n_columns = range.width - range.column;
  for (; first < end; first += 32) {
    PartTerm<typename Tile::Row> term{};
    if (first + lane() < end) term = term_at(first + lane());
    const int of_term = (term.depth + Tile::kGranule - 1) / Tile::kGranule;
    int upto = of_term;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = shuffle(upto, (lane() - distance) & 31);
      if (lane() >= distance) upto += before;
    }
    const int total = shuffle(upto, 31);
    for (int begin = 0; begin < total; begin += Tile::kListed) {
      const int count = static_cast<int>(smaller(total - begin, Tile::kListed));
      list_granules<Tile>(term, range, upto - of_term, begin, count);
      barrier();  // The table is complete, and the sums of another range have been read.
      add_granules(sums, copies, count, range.n_rows, n_columns);
    }
  }
}

// Writes the sum of the terms to ITM_FAST_PART_SUMS: row r and column c of the range at r * kSumStride + c.
template <bool kAligned, typename Tile, typename TermAt>
ITM_FAST_DEVICE void sum_parts(const PartRange& range, int32_t first, int32_t end, const TermAt& term_at) {
  const int thread = opaque(thread_index());  // What depends on it would take registers outside of this function.
  WarpPartSums<Tile> sums(thread);
  add_terms<kAligned>(sums, range, first, end, term_at, thread);
  ITM_FAST_PART_SUMS(row_sums);
  sums.each(range.n_rows, range.width - range.column,
            [&](int row, int column, float sum) { row_sums[row * Tile::kSumStride + column] = sum; });
  barrier();
}

// Calls body(row, column, sum) for the sums of a range. A thread takes the same columns of every row.
template <typename S, typename Body>
ITM_FAST_DEVICE void each_part_sum(const PartRange& range, const Body& body) {
  using Tile = PartTile<S>;
  ITM_FAST_PART_SUMS(row_sums);
  const int column = thread_index();
  if (column >= Tile::kColumns || range.column + column >= range.width) return;
  for (int row = 0; row < range.n_rows; ++row) {
    body(row, column, static_cast<float>(row_sums[row * Tile::kSumStride + column]));
  }
}

// Calls body(first row, rows, first column) for the tiles of a matrix.
template <typename S, typename Body>
ITM_FAST_DEVICE void each_range(int n_rows, int n_columns, const Body& body) {
  using Tile = PartTile<S>;
  for (int row = 0; row < n_rows; row += Tile::kRows) {
    for (int column = 0; column < n_columns; column += Tile::kColumns) {
      body(row, static_cast<int>(smaller(Tile::kRows, n_rows - row)), column);
    }
  }
}

}  // namespace itm_fast::cuda
