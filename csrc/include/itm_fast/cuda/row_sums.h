// Sums of float32 rows on tensor cores, each with its own coefficients: sum_t A_t B_t of float32 matrices A_t (rows of
// the result, depth of t) and runs of rows B_t (depth of t, columns). The terms may be anywhere in global memory. The
// gradients of RCAR's weights and rows are such sums. Sums with coefficients in parts are those of part_sums.h.
//
// A block computes kRows x kColumns of the result. A warp owns 32 columns, so that it loads and splits the fragments of
// B_t once for all rows. Asynchronous copies load steps of 16 rows of B_t, and the coefficients that belong to them,
// into a ring of stages:
//
//   coefficients  [kRows]   [16 + 4 floats]           A, a row of the result each
//   rows          [kDepth]  [kColumns + 8 floats]     B
//
// The padding lets the lanes of a fragment read different banks. For lane % 4 == l, a register of a fragment holds the
// depths l and l + 4, or l + 8 and l + 12: products are summed over the depth, so its order is free.
//
// Both are split into three bfloat16 parts (tile_product.h). Products of a step are added up separately, then added to
// the sums in float32.
#pragma once

#include "itm_fast/cuda/tile_product.h"

namespace itm_fast::cuda {

// A term: coefficients (rows of the result, depth), padded(depth) apart, and rows (depth, columns). An empty term still
// has valid addresses.
struct SumTerm {
  const float *coefficients, *rows;
  int depth;
};

// Rows of both matrices are aligned to 16 bytes, and so far apart that copies of whole parts stay within them.
constexpr int64_t padded(int64_t count) { return (count + 3) / 4 * 4; }

struct RowSumTile {
  static constexpr int kRows = 48, kColumns = 256, kDepth = 16, kRing = 3, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kRows / 16, kColumnTiles = kColumns / kWarps / 8;
  static constexpr int kParts = 3;

  // Stages, in elements.
  static constexpr int kPart = 4;  // elements of an asynchronous copy
  static constexpr int kCoefficientStride = kDepth + 4, kCoefficients = kRows * kCoefficientStride;
  static constexpr int kRowStride = kColumns + 8, kRowStage = kDepth * kRowStride;
  static constexpr int kRowsAt = kRing * kCoefficients * 4;
  static constexpr int kStageBytes = kRowsAt + kRing * kRowStage * 4;

  // The sums take the place of the stages.
  static constexpr int kSumStride = kColumns + 4, kSums = kRows * kSumStride;
  static constexpr int kBytes = kStageBytes > kSums * 4 ? kStageBytes : kSums * 4;
};

#define ITM_FAST_ROW_SUMS(sums) ITM_FAST_DYNAMIC_SHARED(float, sums, 0, RowSumTile::kSums)

// The sums of a warp: all rows of a tile, 32 columns.
struct WarpRowSums {
  using Tile = RowSumTile;
  float sums[Tile::kRowTiles][Tile::kColumnTiles][4] = {};

  // The first column of a tile of columns, from the first of the block.
  ITM_FAST_DEVICE static int column_of(int n) { return (warp() * Tile::kColumnTiles + n) * 8; }

  ITM_FAST_DEVICE void store(int n_rows, int n_columns) const {
    ITM_FAST_ROW_SUMS(row_sums);
    ITM_FAST_UNROLLED
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      ITM_FAST_UNROLLED
      for (int n = 0; n < Tile::kColumnTiles; ++n) {
        if (m * 16 >= n_rows || column_of(n) >= n_columns) continue;
        ITM_FAST_UNROLLED
        for (int i = 0; i < 4; ++i) {
          const Place place = mma_sum_place(lane(), i);
          row_sums[(m * 16 + place.row) * Tile::kSumStride + column_of(n) + place.column] = sums[m][n][i];
        }
      }
    }
  }
};

// What a block sums: rows [first_row, first_row + n_rows) of the result, columns from `column` up to `width`. Rows of
// the terms are row_stride apart.
struct SumRange {
  int first_row, n_rows;
  int column, width, row_stride;
};

// The steps of up to 32 terms, one held by each lane.
class SumSteps {
 public:
  ITM_FAST_DEVICE SumSteps(const SumTerm& of_lane, int count) : of_lane_(of_lane), count_(count) {}
  ITM_FAST_DEVICE bool is_left() const { return next_ < count_; }
  // Takes the term of the next step from its lane.
  ITM_FAST_DEVICE void open() {
    if (at_ > 0) return;
    term.depth = shuffle(of_lane_.depth, next_);
    term.coefficients = from_lane(of_lane_.coefficients);
    term.rows = from_lane(of_lane_.rows);
  }
  ITM_FAST_DEVICE void advance() {
    at_ += RowSumTile::kDepth;
    if (at_ < term.depth) return;
    ++next_;
    at_ = 0;
  }
  ITM_FAST_DEVICE int at() const { return at_; }

  SumTerm term{};

 private:
  template <typename T>
  ITM_FAST_DEVICE const T* from_lane(const T* address) const {
    return reinterpret_cast<const T*>(shuffle(reinterpret_cast<uint64_t>(address), next_));
  }

  const SumTerm& of_lane_;
  const int count_;
  int next_ = 0, at_ = 0;
};

// Copies steps to stages. Rows and coefficients beyond the depth of a term become zero. Columns beyond the range are
// copied from anywhere within the rows, because their sums are not read. A thread copies the same columns of every
// step.
class StepCopies {
  using Tile = RowSumTile;
  static constexpr int kPartsOfRow = Tile::kColumns / Tile::kPart, kApart = Tile::kThreads / kPartsOfRow;

 public:
  ITM_FAST_DEVICE explicit StepCopies(const SumRange& range) {
    const int row = thread_index() / 4, column = thread_index() % kPartsOfRow * Tile::kPart;
    const int left = range.width - range.column - column;
    depth_ = thread_index() % 4 * 4;
    has_coefficients_ = row < range.n_rows;
    coefficient_row_ = has_coefficients_ ? static_cast<uint32_t>(range.first_row + row) : 0u;
    coefficient_place_ = row < (range.n_rows + 15) / 16 * 16 ? row * Tile::kCoefficientStride + depth_ : -1;
    first_ = thread_index() / kPartsOfRow;
    column_ = left > 0 ? range.column + column : 0;
    row_bytes_ = static_cast<uint32_t>(range.row_stride) * 4u;
    // The fragments of two tiles of columns are loaded together.
    row_place_ = left > -16 ? first_ * Tile::kRowStride + column : -1;
  }

  ITM_FAST_DEVICE void start(const SumTerm& term, int at, int stage) const {
    ITM_FAST_DYNAMIC_SHARED(float, coefficients, 0, Tile::kRing* Tile::kCoefficients);
    ITM_FAST_DYNAMIC_SHARED(float, rows, Tile::kRowsAt, Tile::kRing* Tile::kRowStage);
    if (coefficient_place_ >= 0) {
      const uint32_t apart = (static_cast<uint32_t>(term.depth) + 3u) & ~3u;  // padded(depth) in 32 bits
      const int left = term.depth - at - depth_;
      const int count = !has_coefficients_ || left <= 0 ? 0 : left < 4 ? left : 4;
      const float* row = term.coefficients + uint64_t{coefficient_row_} * apart;
      copy_async(coefficients, stage * Tile::kCoefficients + coefficient_place_, row + (left > 0 ? at + depth_ : 0),
                 count);
    }
    if (row_place_ < 0) return;
    const auto* source = reinterpret_cast<const unsigned char*>(term.rows + column_);
    const int target = stage * Tile::kRowStage + row_place_;
    ITM_FAST_UNROLLED
    for (int i = 0; i < Tile::kDepth / kApart; ++i) {
      const int row = at + first_ + i * kApart;
      const bool is_inside = row < term.depth;
      const auto* part = source + uint64_t{is_inside ? static_cast<uint32_t>(row) : 0u} * row_bytes_;
      copy_async(rows, target + i * kApart * Tile::kRowStride, reinterpret_cast<const float*>(part),
                 is_inside ? Tile::kPart : 0);
    }
  }

 private:
  bool has_coefficients_;
  uint32_t coefficient_row_, row_bytes_;
  int depth_, coefficient_place_;  // -1: no place
  int first_, column_, row_place_;
};

// The depths in a register of a fragment: those of lane % 4 in its first half, and 4 further in the second.
constexpr int depth_of(int lane, int half, int element) { return lane % 4 + 8 * half + 4 * element; }

ITM_FAST_DEVICE void load_coefficients(RowFragment<RowSumTile::kParts>& fragment, int stage, int tile) {
  using Tile = RowSumTile;
  ITM_FAST_DYNAMIC_SHARED(float, coefficients, 0, Tile::kRing* Tile::kCoefficients);
  ITM_FAST_UNROLLED
  for (int i = 0; i < 4; ++i) {  // Register i: rows 8 (i % 2) and up, depths 8 (i / 2) and up.
    const int at = stage * Tile::kCoefficients + (tile * 16 + lane() / 4 + i % 2 * 8) * Tile::kCoefficientStride;
    uint32_t parts[Tile::kParts];
    split_floats<Tile::kParts>(coefficients[at + depth_of(lane(), i / 2, 0)],
                               coefficients[at + depth_of(lane(), i / 2, 1)], parts);
    for (int part = 0; part < Tile::kParts; ++part) fragment.parts[part][i] = parts[part];
  }
}

// The fragments of two adjacent tiles of columns.
ITM_FAST_DEVICE void load_summed(ColumnFragment<RowSumTile::kParts> (&fragments)[2], int stage, int column) {
  using Tile = RowSumTile;
  ITM_FAST_DYNAMIC_SHARED(float, rows, Tile::kRowsAt, Tile::kRing* Tile::kRowStage);
  const int first = stage * Tile::kRowStage + column;
  ITM_FAST_UNROLLED
  for (int i = 0; i < 4; ++i) {
    const int at = first + i / 2 * 8 + lane() / 4;
    uint32_t parts[Tile::kParts];
    split_floats<Tile::kParts>(rows[at + depth_of(lane(), i % 2, 0) * Tile::kRowStride],
                               rows[at + depth_of(lane(), i % 2, 1) * Tile::kRowStride], parts);
    for (int part = 0; part < Tile::kParts; ++part) fragments[i / 2].parts[part][i % 2] = parts[part];
  }
}

ITM_FAST_DEVICE void add_step(WarpRowSums& sums, int stage, int n_rows, int n_columns) {
  using Tile = RowSumTile;
  if (WarpRowSums::column_of(0) >= n_columns) return;
  ColumnFragment<Tile::kParts> columns[Tile::kColumnTiles / 2][2];
  ITM_FAST_UNROLLED
  for (int n = 0; n < Tile::kColumnTiles; n += 2) {
    if (WarpRowSums::column_of(n) < n_columns) load_summed(columns[n / 2], stage, WarpRowSums::column_of(n));
  }
  ITM_FAST_UNROLLED
  for (int m = 0; m < Tile::kRowTiles; ++m) {
    if (m * 16 >= n_rows) break;
    RowFragment<Tile::kParts> of_rows;
    load_coefficients(of_rows, stage, m);
    ITM_FAST_UNROLLED
    for (int n = 0; n < Tile::kColumnTiles; n += 2) {
      if (WarpRowSums::column_of(n) < n_columns) {
        multiply_pair<false, true>(sums.sums[m][n], sums.sums[m][n + 1], of_rows, columns[n / 2][0], columns[n / 2][1]);
      }
    }
  }
}

// Adds up to 32 terms. For all threads of the block; ends with a barrier.
ITM_FAST_DEVICE void add_terms(WarpRowSums& sums, SumSteps steps, const StepCopies& copies, int n_rows, int n_columns) {
  constexpr int kRing = RowSumTile::kRing;
  int started = 0, filled = 0, multiplied = 0;  // steps whose copies have started; stages that are filled and used next
  for (int step = 1 - kRing; step < started || step < 0; ++step) {  // The first ones only start copies.
    if (step >= 0) {
      wait_copies<kRing - 2>();
      barrier();  // All copies have landed, and all threads are done with the stage that is filled next.
    }
    if (steps.is_left()) {
      steps.open();
      copies.start(steps.term, steps.at(), filled);
      steps.advance();
      ++started;
      filled = filled + 1 < kRing ? filled + 1 : 0;
    }
    commit_copies();  // An empty group counts, too: the number of pending groups stays the same.
    if (step >= 0) {
      add_step(sums, multiplied, n_rows, n_columns);
      multiplied = multiplied + 1 < kRing ? multiplied + 1 : 0;
    }
  }
  wait_copies<0>();
  barrier();  // The stages are filled again, or replaced by the sums.
}

// Writes the sum of the terms term_at(entry), for entries from `first` up to `end`, to ITM_FAST_ROW_SUMS: row r and
// column c of the range at r * kSumStride + c. Each lane looks up a term, so that the loads of 32 terms overlap. For
// all threads of the block; ends with a barrier.
template <typename TermAt>
ITM_FAST_DEVICE void sum_rows(const SumRange& range, int32_t first, int32_t end, const TermAt& term_at) {
  WarpRowSums sums;
  const StepCopies copies(range);
  const int n_columns = range.width - range.column;
  for (; first < end; first += 32) {
    SumTerm of_lane{};
    if (first + lane() < end) of_lane = term_at(first + lane());
    const int count = end - first < 32 ? end - first : 32;
    add_terms(sums, SumSteps(of_lane, count), copies, range.n_rows, n_columns);
  }
  sums.store(range.n_rows, n_columns);
  barrier();
}

// Calls body(row, column, sum) for the sums of a range. A thread takes the same columns of every row.
template <typename Body>
ITM_FAST_DEVICE void each_row_sum(const SumRange& range, const Body& body) {
  using Tile = RowSumTile;
  ITM_FAST_ROW_SUMS(row_sums);
  const int column = thread_index();
  if (range.column + column >= range.width) return;
  for (int row = 0; row < range.n_rows; ++row) {
    body(row, column, static_cast<float>(row_sums[row * Tile::kSumStride + column]));
  }
}

}  // namespace itm_fast::cuda
