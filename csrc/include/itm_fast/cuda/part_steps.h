// The terms of a sum of rows (part_sums.h), and the asynchronous copies of its steps to shared memory.
//
// The depths of all terms follow each other, in granules of 8 that a table in shared memory locates. A step of four
// granules goes to a stage of a ring:
//
//   coefficients  [kDepth]   [kParts x kRows + 8 of 16 bits]        A, a depth each
//   rows          [kDepth]   [kColumns (x kRowParts) + 16 bytes]    B
//
// The padding lets the lanes of a fragment read different banks.
#pragma once

#include "itm_fast/cuda/part_matrix.h"
#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/tile_product.h"

namespace itm_fast::cuda {

// Parts of rows, and of their coefficients unless the tile has others.
template <typename S>
struct RowParts {
  static constexpr bool kSplit = false;  // The rows are a PartMatrix.
  static constexpr int kOfRows = std::is_same_v<S, float> ? 3 : std::is_same_v<S, Half> ? 2 : 1;
  static constexpr int kOfCoefficients = std::is_same_v<S, float> ? 3 : 2;
};
template <int kParts>
struct RowParts<SplitElement<kParts>> {
  static constexpr bool kSplit = true;
  static constexpr int kOfRows = kParts, kOfCoefficients = kParts;
};

// A term. An empty one still has valid addresses.
template <typename S>
struct PartTerm {
  const uint16_t* coefficients;  // a PartMatrix (depth, rows of the result)
  const S* rows;                 // (depth, columns)
  int depth;
};

// What a block sums: rows [first_row, first_row + n_rows) of the result, columns from `column` up to `width`. The rows
// of B are row_stride elements apart, or those of one part. `coefficient_stride` is that of the PartMatrix.
struct PartRange {
  int first_row, n_rows;
  int column, width, row_stride;
  int coefficient_stride;
};

// Narrow tiles suit the sums of a set, tiles of 128 rows those of a matrix (block_gradients.h), which take half of the
// rows to a warp.
template <typename S, int kTileRows = 48, int kCoefficientParts = RowParts<S>::kOfCoefficients>
struct PartTile {
  using Row = S;
  static constexpr bool kFloat = std::is_same_v<S, float>, kSplit = RowParts<S>::kSplit;
  static constexpr int kRowParts = RowParts<S>::kOfRows, kParts = kCoefficientParts;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRows = kTileRows, kRowWarps = kRows > 64 ? 2 : 1, kColumnWarps = kWarps / kRowWarps;
  static constexpr int kColumns = kSplit || kRowWarps > 1 ? 128 : 256, kGranule = 8, kDepth = 4 * kGranule;
  static constexpr int kRing = kFloat || kSplit || kParts > 2 ? 2 : 3;
  static constexpr int kRowTiles = kRows / 16 / kRowWarps, kColumnTiles = kColumns / kColumnWarps / 8;  // of a warp
  static constexpr int kListed = 128;  // granules in the table
  // Whether the products of a step are added up separately, because tensor cores truncate running sums.
  static constexpr bool kByStep = !std::is_same_v<S, BFloat16> || kParts > 2;
  // Tiles of columns that are multiplied together: their products alternate, so that none waits for the one before it.
  // Fragments of float32 take too many registers for all of them.
  static constexpr int kTogether = kFloat || kSplit ? 2 : 4;

  // Stages, in elements.
  using Unit = std::conditional_t<kFloat, float, uint16_t>;
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(Unit));  // elements of an asynchronous copy
  static constexpr int kCoefficientStride = kParts * kRows + 8, kCoefficients = kDepth * kCoefficientStride;
  static constexpr int kRowStride = kColumns * (kSplit ? kRowParts : 1) + kPiece, kRowStage = kDepth * kRowStride;
  static constexpr int kRowsAt = kRing * kCoefficients * 2;
  static constexpr int kStageBytes = kRowsAt + kRing * kRowStage * static_cast<int>(sizeof(Unit));

  // The sums of narrow tiles take the place of the stages.
  static constexpr int kSumStride = 256 + 4, kSums = kRowWarps > 1 ? 0 : kRows * kSumStride;
  static constexpr int kTableAt = kStageBytes > kSums * 4 ? kStageBytes : kSums * 4;
  static constexpr int kBytes = kTableAt + kListed * 32;
};

// Eight depths of a term: addresses of the first, and how many the term has from there.
template <typename S>
struct alignas(16) Granule {
  const uint16_t* coefficients;
  const S* rows;
  int left;
};
#define ITM_FAST_GRANULES(granules) \
  ITM_FAST_DYNAMIC_SHARED(Granule<typename Tile::Row>, granules, Tile::kTableAt, Tile::kListed)

// Copies steps to stages. Depths outside of a term become zero. Rows of the result and columns outside of the matrices
// are anything: their sums are not used. A warp copies four depths of one granule. A thread copies the same columns of
// every step.
template <bool kAligned, typename Tile>
class GranuleCopies {
  using S = typename Tile::Row;
  using Unit = typename Tile::Unit;
  static constexpr int kDepths = 4, kPiecesOfRow = Tile::kColumns / Tile::kPiece;
  static constexpr int kMatrices = Tile::kSplit ? Tile::kRowParts : 1;
  static constexpr int kSpans = Tile::kFloat ? 2 : 1;        // of columns, each a piece per lane
  static constexpr int kLanesOfRow = kPiecesOfRow / kSpans;  // 16 or 32
  static constexpr int kRowsOfLane = kDepths * kLanesOfRow / 32;
  static constexpr int kRowSpans = Tile::kRows > 64 ? 2 : 1;  // of the rows of the result, 64 each

 public:
  ITM_FAST_DEVICE GranuleCopies(const PartRange& range, int thread)
      : granule_(thread / 64), coefficient_stride_(range.coefficient_stride), row_stride_(range.row_stride) {
    const int lane = thread % 32, depth = thread / 32 % 2 * kDepths, piece = lane % 8 * 8;
    coefficient_depth_ = depth + lane / 8;
    for (int span = 0; span < kRowSpans; ++span) {
      coefficient_offsets_[span] =
          coefficient_depth_ * Tile::kParts * coefficient_stride_ +
          static_cast<int>(smaller(range.first_row + span * 64 + piece, coefficient_stride_ - 8));
    }
    coefficient_place_ =
        piece < Tile::kRows ? (granule_ * Tile::kGranule + coefficient_depth_) * Tile::kCoefficientStride + piece : -1;
    depth_ = depth + lane / kLanesOfRow * kRowsOfLane;
    const int stage_row = (granule_ * Tile::kGranule + depth_) * Tile::kRowStride;
    for (int span = 0; span < kSpans; ++span) {
      const int column = (span * kLanesOfRow + lane % kLanesOfRow) * Tile::kPiece;
      const int left = range.width - range.column - column, of_row = range.column + column;
      columns_[span] = left < 0 ? 0 : left < Tile::kPiece ? left : Tile::kPiece;
      row_offsets_[span] = depth_ * kMatrices * row_stride_ +
                           static_cast<int>(kAligned ? smaller(of_row, row_stride_ - Tile::kPiece) : of_row);
      // Warps multiply all of their columns, or none.
      const int own = Tile::kColumns / Tile::kColumnWarps;
      places_[span] = column / own * own < range.width - range.column ? stage_row + column : -1;
    }
  }

  ITM_FAST_DEVICE void start(int step, int stage) const {
    ITM_FAST_GRANULES(granules);
    ITM_FAST_DYNAMIC_SHARED(uint16_t, coefficients, 0, Tile::kRing* Tile::kCoefficients);
    const Granule<S> from = granules[step * (Tile::kDepth / Tile::kGranule) + granule_];
    if (coefficient_place_ >= 0) {
      const int target = stage * Tile::kCoefficients + coefficient_place_;
      ITM_FAST_UNROLLED
      for (int i = 0; i < kRowSpans * Tile::kParts; ++i) {
        const int span = i / Tile::kParts, part = i % Tile::kParts;
        copy_async(coefficients, target + part * Tile::kRows + span * 64,
                   from.coefficients + (coefficient_offsets_[span] + part * coefficient_stride_),
                   coefficient_depth_ < from.left ? 8 : 0);
      }
    }
    ITM_FAST_UNROLLED
    for (int span = 0; span < kSpans; ++span) {
      if (places_[span] >= 0) copy_rows(from, stage * Tile::kRowStage + places_[span], span);
    }
  }

 private:
  ITM_FAST_DEVICE void copy_rows(const Granule<S>& from, int target, int span) const {
    ITM_FAST_DYNAMIC_SHARED(Unit, rows, Tile::kRowsAt, Tile::kRing * Tile::kRowStage);
    const Unit* source = reinterpret_cast<const Unit*>(from.rows) + row_offsets_[span];
    if constexpr (kAligned) {
      ITM_FAST_UNROLLED
      for (int i = 0; i < kRowsOfLane * kMatrices; ++i) {
        const int row = i / kMatrices, matrix = i % kMatrices;
        copy_async(rows, target + row * Tile::kRowStride + matrix * Tile::kColumns, source + i * row_stride_,
                   depth_ + row < from.left ? Tile::kPiece : 0);
      }
    } else {
      ITM_FAST_ROLLED
      for (int i = 0; i < kRowsOfLane * Tile::kPiece; ++i) {
        const int row = i / Tile::kPiece, column = i % Tile::kPiece;
        Unit value{};
        if (depth_ + row < from.left && column < columns_[span]) value = source[row * row_stride_ + column];
        rows[target + row * Tile::kRowStride + column] = value;
      }
    }
  }

  int granule_;                                                     // of a step
  int coefficient_stride_, coefficient_depth_, coefficient_place_;  // -1: no place
  int coefficient_offsets_[kRowSpans];                              // of the lane's pieces
  int row_stride_, depth_;                                          // depth in the granule
  int columns_[kSpans], row_offsets_[kSpans], places_[kSpans];      // columns of a piece; -1: no place
};

}  // namespace itm_fast::cuda
