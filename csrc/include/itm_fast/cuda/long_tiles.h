// The scores of two tiles if one of them is a set that is longer than a tile, on tensor cores.
//
// One block multiplies the pair piece by piece and keeps raw scores and attention in its slab of global memory. The
// norms of attended vectors come from tensor cores, too: from the Gram matrix of a long context set, or from sums of
// its rows (sums_rows). Other steps are those of score_products.
#pragma once

#include "itm_fast/cuda/cross_attention.h"

namespace itm_fast::cuda {

// The arrays of a block, in floats from the start of its slab, for pairs of at most `rows` contexts and `columns`
// queries.
struct SlabLayout {
  int64_t rows, columns;  // multiples of kGramBlock
  int64_t operand_bytes;  // of the attention as an operand: 4, or 6 for three parts beside 16-bit rows

  constexpr int64_t raw() const { return 0; }  // (rows, columns)
  // The attention as an operand: (queries, contexts) in float32, or a PartMatrix (contexts, queries) of three parts.
  constexpr int64_t attention() const { return raw() + rows * columns; }
  constexpr int64_t factors() const { return attention() + rows * columns * operand_bytes / 4; }  // (query sets, rows)
  constexpr int64_t totals() const { return factors() + kTileSets * rows; }         // (context sets, columns)
  constexpr int64_t dots() const { return totals() + kTileSets * columns; }         // the same
  constexpr int64_t squares() const { return dots() + kTileSets * columns; }        // the same, then cosines
  constexpr int64_t scales() const { return squares() + kTileSets * columns; }      // the same
  constexpr int64_t column_sets() const { return scales() + kTileSets * columns; }  // (columns,) int32
  constexpr int64_t size() const { return column_sets() + columns; }
};

// Writes the squared norms of sums of rows, one for each query; a warp per query adds the squares. `stride`: of the
// coefficients. A separate function, so that its registers are its own.
template <typename Tile, typename S>
ITM_FAST_DEVICE_APART void write_squares(const PartTerm<S>& term, int stride, int n_queries, int dim, float* squares) {
  using Sums = AttendedSums<S>;
  static_assert(Sums::kBytes <= ScoreMemory<Tile>::kFactors && Sums::kThreads == Tile::kThreads);
  ITM_FAST_PART_SUMS(row_sums);
  for (int query = 0; query < n_queries; query += Sums::kRows) {
    const int left = n_queries - query, count = left < Sums::kRows ? left : Sums::kRows;
    for (int d = 0; d < dim; d += Sums::kColumns) {
      sum_parts<true, Sums>(PartRange{query, count, d, dim, dim, stride}, 0, 1, [&](int32_t) { return term; });
      const int width = dim - d < Sums::kColumns ? dim - d : Sums::kColumns;
      for (int j = warp(); j < count; j += Sums::kWarps) {
        float square = 0.0f;
        for (int c = lane(); c < width; c += 32) {
          const float attended = row_sums[j * Sums::kSumStride + c];
          square += attended * attended;
        }
        square = add_lanes(square);
        if (lane() == 0) squares[query + j] = d == 0 ? square : squares[query + j] + square;
      }
      // No barrier: a set has rows, so sum_parts has one before its first copy.
    }
  }
}

template <int kParts, typename Tile, typename S>
class LongTile {
  using Memory = ScoreMemory<Tile>;

 public:
  ITM_FAST_DEVICE LongTile(const ScoreProblem<S>& p, const TileSets& contexts, const TileSets& queries,
                           const SlabLayout& layout, float* slab)
      : p_(p),
        contexts_(contexts),
        queries_(queries),
        layout_(layout),
        raw_(slab + layout.raw()),
        attention_(slab + layout.attention()),
        factors_(slab + layout.factors()),
        totals_(slab + layout.totals()),
        dots_(slab + layout.dots()),
        squares_(slab + layout.squares()),
        scales_(slab + layout.scales()),
        column_sets_(reinterpret_cast<int32_t*>(slab + layout.column_sets())),
        rows_(p.contexts.values + contexts.first_row * p.dim),
        columns_(p.queries.values + queries.first_row * p.dim) {}

  ITM_FAST_DEVICE void score() {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    if (warp() == 0) find_starts(p_.contexts, contexts_, static_cast<int>(layout_.rows), context_starts);
    if (warp() == Tile::kWarps - 1) find_starts(p_.queries, queries_, static_cast<int>(layout_.columns), query_starts);
    barrier();
    n_rows_ = context_starts[contexts_.n_sets];
    n_columns_ = query_starts[queries_.n_sets];
    is_summed_ = contexts_.is_long && sums_rows(p_, n_rows_);
    stride_ = is_summed_ ? static_cast<int>(padded_parts(n_columns_)) : gram_stride(n_rows_);
    multiply();
    with_options(p_.options, [&](const auto& options) {
      write_factors(options);
      if (is_summed_) {
        attend(options, [&](int k, int column, float e) { parts().store(k, column, e); });
      } else {
        attend(options, [&](int k, int column, float e) {
          if (contexts_.is_long) attention_[column * stride_ + k] = e;
        });
      }
    });
    if (contexts_.is_long) {
      if (is_summed_) {
        if constexpr (!std::is_same_v<S, float>) {
          write_squares<Tile>(PartTerm<S>{parts().first, rows_, n_rows_}, stride_, n_columns_, static_cast<int>(p_.dim),
                              squares_);
        }
        write_scales();
      } else {
        write_norms();
      }
    }
    write_cosines();
    with_options(p_.options, [&](const auto& options) { write_scores(options); });
    barrier();  // All have read the shared memory and the slab.
  }

 private:
  ITM_FAST_DEVICE static int part_of(int left, int most) { return left < most ? left : most; }
  ITM_FAST_DEVICE PartMatrix<3> parts() const { return {reinterpret_cast<uint16_t*>(attention_), stride_}; }
  ITM_FAST_DEVICE float& raw(int row, int column) const { return raw_[row * layout_.columns + column]; }
  ITM_FAST_DEVICE const float* gram_of(int row) const { return p_.grams + (contexts_.first_row + row) * p_.gram_width; }

  ITM_FAST_DEVICE void multiply() {
    ITM_FAST_TILE_SCORES(Tile);
    for (int row = 0; row < n_rows_; row += Tile::kRows) {
      for (int column = 0; column < n_columns_; column += Tile::kColumns) {
        const int rows = part_of(n_rows_ - row, Tile::kRows), columns = part_of(n_columns_ - column, Tile::kColumns);
        multiply_tile<kParts, Tile>(RowRun<S>{rows_ + row * p_.dim, rows, p_.dim},
                                    RowRun<S>{columns_ + column * p_.dim, columns, p_.dim}, p_.dim, p_.is_aligned);
        for (int i = thread_index(); i < rows * columns; i += Tile::kThreads) {
          const int r = i / columns, c = i % columns;
          raw(row + r, column + c) = scores[r * Tile::kScoreStride + c];
        }
        barrier();  // Before the next product overwrites the scores.
      }
    }
  }

  template <typename Options>
  ITM_FAST_DEVICE void write_factors(const Options& options) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    for (int i = thread_index(); i < n_rows_ * queries_.n_sets; i += Tile::kThreads) {
      const int row = i % n_rows_, set = i / n_rows_, first = query_starts[set], last = query_starts[set + 1];
      const auto score = [&](int j) { return raw(row, first + j); };
      if (last > first) factors_[set * layout_.rows + row] = row_factor(score, last - first, options);
    }
    for (int set = thread_index(); set < queries_.n_sets; set += Tile::kThreads) {
      const int last = query_starts[set + 1];
      for (int column = query_starts[set]; column < last; ++column) column_sets_[column] = set;
    }
    barrier();
  }

  // A thread per context set and query. The attention replaces the raw scores; store_operand(k, column, e) stores it as
  // an operand.
  template <typename Options, typename StoreOperand>
  ITM_FAST_DEVICE void attend(const Options& options, const StoreOperand& store_operand) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    for (int item = thread_index(); item < n_columns_ * contexts_.n_sets; item += Tile::kThreads) {
      const int column = item % n_columns_, set = item / n_columns_;
      const int row = context_starts[set], n = context_starts[set + 1] - row;
      if (n == 0) continue;
      const float* factors = factors_ + column_sets_[column] * layout_.rows + row;
      const auto score = [&](int k) { return raw(row + k, column); };
      const auto factor = [&](int k) { return factors[k]; };
      const auto store = [&](int k, float e) {
        raw(row + k, column) = e;
        store_operand(k, column, e);
      };
      const ColumnAttention sums = attend_column(score, factor, store, n, options);
      const int64_t at = set * layout_.columns + column;
      totals_[at] = sums.total;
      dots_[at] = sums.dot;
      if (contexts_.is_long) {
        for (int k = n; k < stride_ && !is_summed_; ++k) attention_[column * stride_ + k] = 0.0f;
      } else {
        const AttendedNorm norm = attended_norm(score, gram_of(row), n);
        squares_[at] = norm.square;
        scales_[at] = norm.scale;
      }
    }
    barrier();
  }

  // e' G e of a long context set: G times the attention, then a thread per query.
  ITM_FAST_DEVICE void write_norms() const {
    ITM_FAST_TILE_SCORES(Tile);
    const float* gram = gram_of(0);
    for (int column = 0; column < n_columns_; column += Tile::kColumns) {
      const int columns = part_of(n_columns_ - column, Tile::kColumns);
      AttendedNorm norm;
      for (int row = 0; row < n_rows_; row += Tile::kRows) {
        const int rows = part_of(n_rows_ - row, Tile::kRows);
        multiply_tile<3, Tile>(RowRun<float>{gram + int64_t{row} * stride_, rows, stride_},
                               RowRun<float>{attention_ + column * stride_, columns, stride_}, stride_, true);
        for (int r = 0; r < rows && thread_index() < columns; ++r) {
          const float e = raw(row + r, column + thread_index());
          norm.square += e * scores[r * Tile::kScoreStride + thread_index()];
          norm.scale += e * sqrtf(gram[gram_diagonal(row + r, n_rows_)]);
        }
        barrier();  // Before the next product overwrites the scores.
      }
      if (thread_index() < columns) {
        squares_[column + thread_index()] = norm.square;
        scales_[column + thread_index()] = norm.scale;
      }
    }
    barrier();
  }

  // What the squared norms are compared with to detect lost digits; a thread per query.
  ITM_FAST_DEVICE void write_scales() const {
    const float* gram = gram_of(0);
    for (int column = thread_index(); column < n_columns_; column += Tile::kThreads) {
      float scale = 0.0f;
      for (int k = 0; k < n_rows_; ++k) scale += raw(k, column) * sqrtf(gram[gram_diagonal(k, n_rows_)]);
      scales_[column] = scale;
    }
    barrier();
  }

  // A warp per context set and query, because it forms attended vectors whose norm has lost its digits.
  ITM_FAST_DEVICE void write_cosines() const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    for (int item = warp(); item < n_columns_ * contexts_.n_sets; item += Tile::kWarps) {
      const int column = item % n_columns_, set = item / n_columns_;
      const int row = context_starts[set], n = context_starts[set + 1] - row;
      if (n == 0) continue;
      const int64_t at = set * layout_.columns + column;
      AttendedNorm norm;
      norm.square = squares_[at];
      norm.scale = scales_[at];
      float dot = dots_[at];
      if (norm.is_lost()) {
        const auto attention = [&](int k) { return raw(row + k, column); };
        const ExactAttention exact =
            attend_exactly(attention, rows_ + row * p_.dim, n, columns_ + column * p_.dim, p_.dim);
        norm.square = exact.square;
        dot = exact.dot;
      }
      warp_sync();  // All lanes have read the square, which the cosine replaces.
      const float query_norm = p_.query_norms[queries_.first_row + column];
      if (lane() == 0) squares_[at] = cosine_of(dot, norm.square, totals_[at], query_norm);
    }
    barrier();
  }

  template <typename Options>
  ITM_FAST_DEVICE void write_scores(const Options& options) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    for (int i = thread_index(); i < queries_.n_sets * contexts_.n_sets; i += Tile::kThreads) {
      const int set = i % contexts_.n_sets, query = i / contexts_.n_sets;
      const int first = query_starts[query], last = query_starts[query + 1];
      const bool is_empty = context_starts[set + 1] == context_starts[set] || last == first;
      CosineAggregate aggregate;
      for (int j = first; j < last && !is_empty; ++j) {
        aggregate.add(squares_[set * layout_.columns + j], options);
      }
      p_.scores[score_place(p_, queries_.first_set + query, contexts_.first_set + set)] =
          is_empty ? 0.0f : aggregate.result(last - first, options);
    }
  }

  const ScoreProblem<S>& p_;
  const TileSets &contexts_, &queries_;
  const SlabLayout& layout_;
  float *raw_, *attention_, *factors_, *totals_, *dots_, *squares_, *scales_;
  int32_t* column_sets_;
  const S *rows_, *columns_;
  int n_rows_ = 0, n_columns_ = 0;
  int stride_ = 0;          // of the rows of `attention_`, or of their parts
  bool is_summed_ = false;  // whether norms come from sums of rows
};

template <typename S>
struct LongProblem {
  ScoreProblem<S> scoring;
  SlabLayout layout;
  float* slabs;  // one per block
};

// The scores of all pairs of tiles. Grid: as many blocks as there are slabs.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_long_tiles(const LongProblem<S>& p) {
  const ScoreProblem<S>& scoring = p.scoring;
  for (int64_t pair = block_index(); pair < tile_pairs(scoring); pair += grid_blocks()) {
    const TilePair tiles = open_pair<Tile>(scoring, pair);
    const bool fits = scoring.contexts.length(tiles.contexts.first_set) <= p.layout.rows &&
                      scoring.queries.length(tiles.queries.first_set) <= p.layout.columns;
    if (tiles.is_long() && fits) {
      LongTile<kParts, Tile, S>(scoring, tiles.contexts, tiles.queries, p.layout,
                                p.slabs + block_index() * p.layout.size())
          .score();
    } else {
      score_pair<kParts, Tile>(scoring, tiles);
      barrier();  // All have read the shared memory of this pair.
    }
  }
}

}  // namespace itm_fast::cuda
