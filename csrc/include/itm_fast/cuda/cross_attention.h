// cross_attention_scores on a GPU: two launches.
//
// prepare_scores packs the sets of both sides into tiles, and computes the Gram matrices of context sets (sums_rows:
// only the diagonal) and the norms of the queries. score_tile then computes all scores of a tile of contexts with a
// tile of queries: raw scores on tensor cores (tile_product.h), the rest in shared memory, where the attention replaces
// the raw scores. Only scores leave the chip. One block computes each score, in an order that depends only on shapes.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/long_pairs.h"
#include "itm_fast/cuda/part_sums.h"
#include "itm_fast/cuda/set_gram.h"
#include "itm_fast/cuda/set_tiles.h"
#include "itm_fast/cuda/tile_pairs.h"
#include "itm_fast/cuda/tile_product.h"

namespace itm_fast::cuda {

template <typename S>
struct ScoreProblem {
  SetRows<S> queries, contexts;
  int64_t dim;
  PairOptions options;
  bool is_aligned;                      // rows are aligned to 16 bytes
  TilePlan query_tiles, context_tiles;  // written by prepare_scores, as are:
  int64_t gram_width;                   // sets up to this length have a Gram matrix
  float* grams;                         // (contexts.n_rows, gram_width): a set's matrix starts at its first row
  float* query_norms;                   // (queries.n_rows,)
  float* scores;                        // (queries.n_sets, contexts.n_sets), or its transpose
  bool is_transposed;
};

// The place of a pair in p.scores.
template <typename S>
ITM_FAST_DEVICE int64_t score_place(const ScoreProblem<S>& p, int64_t query, int64_t context) {
  return p.is_transposed ? context * p.queries.n_sets + query : query * p.contexts.n_sets + context;
}

// Whether the norms of attended vectors of a set of n contexts, longer than a tile, come from sums of its rows instead
// of its Gram matrix, which takes more multiply-adds.
template <typename S>
ITM_FAST_DEVICE bool sums_rows(const ScoreProblem<S>& p, int64_t n) {
  return !std::is_same_v<S, float> && p.is_aligned && p.dim < n;
}

template <typename Tile, typename S>
ITM_FAST_DEVICE_APART void write_diagonal(const S* rows, int n, int64_t dim, float* gram) {
  for (int k = warp(); k < n; k += Tile::kWarps) {
    const float norm = norm_of_row(rows + k * dim, dim);
    if (lane() == 0) gram[gram_diagonal(k, n)] = norm * norm;
  }
}

// The Gram matrix of one context set, or its diagonal if only this is used.
template <typename Tile, typename S>
ITM_FAST_DEVICE void write_gram(const ScoreProblem<S>& p, int64_t set) {
  const int64_t length = p.contexts.length(set), first = p.contexts.offset(set);
  if (length == 0 || length > p.gram_width) return;  // Longer sets do not use one.
  const S* rows = p.contexts.values + first * p.dim;
  float* gram = p.grams + first * p.gram_width;
  if (length > Tile::kRows && sums_rows(p, length)) {
    write_diagonal<Tile>(rows, static_cast<int>(length), p.dim, gram);
  } else {
    write_gram_of_set<kSetParts<S>>(rows, static_cast<int>(length), p.dim, p.is_aligned, gram);
  }
}

template <typename S>
ITM_FAST_DEVICE void write_query_norm(const ScoreProblem<S>& p, int64_t row) {
  const float norm = norm_of_row(p.queries.values + row * p.dim, p.dim);
  if (lane() == 0) p.query_norms[row] = norm;
}

// The part of one block. Grid: a block for each plan, one per context set, then one per kNormRows queries.
inline constexpr int64_t kNormRows = 64;

template <typename Tile, typename S>
ITM_FAST_DEVICE void prepare_scores(const ScoreProblem<S>& p, int64_t block) {
  static_assert(Tile::kThreads == SetTile::kThreads);
  if (block == 0) {
    plan_tiles<Tile::kWindow>(p.contexts, Tile::kRows, p.context_tiles);
  } else if (block == 1) {
    plan_tiles<Tile::kWindow>(p.queries, Tile::kColumns, p.query_tiles);
  } else if ((block -= 2) < p.contexts.n_sets) {
    write_gram<Tile>(p, block);
  } else {
    const int64_t first = (block - p.contexts.n_sets) * kNormRows;
    for (int64_t row = first + warp(); row < first + kNormRows && row < p.queries.n_rows; row += Tile::kWarps) {
      write_query_norm(p, row);
    }
  }
}

template <typename Tile, typename S>
ITM_FAST_DEVICE void prepare_scores(const ScoreProblem<S>& p) {
  prepare_scores<Tile>(p, block_index());
}

// Two problems in one launch: the blocks of one, then those of the other.
template <typename S>
struct PreparationOfBoth {
  ScoreProblem<S> one, other;
  int64_t blocks_of_one;
};

template <typename Tile, typename S>
ITM_FAST_DEVICE void prepare_scores(const PreparationOfBoth<S>& p) {
  if (block_index() < p.blocks_of_one) {
    prepare_scores<Tile>(p.one, block_index());
  } else {
    prepare_scores<Tile>(p.other, block_index() - p.blocks_of_one);
  }
}

// Sums of a warp's threads over a query's attended vector, sum_k e_k x_k, computed from the contexts themselves.
struct ExactAttention {
  float square, dot;
};
template <typename S, typename Attention>
ITM_FAST_DEVICE ExactAttention attend_exactly(const Attention& attention, const S* contexts, int n, const S* query,
                                              int64_t dim) {
  ExactAttention found{0.0f, 0.0f};
  for (int64_t d = lane(); d < dim; d += 32) {
    float attended = 0.0f;
    for (int k = 0; k < n; ++k) attended += attention(k) * widen(contexts[k * dim + d]);
    found.square += attended * attended;
    found.dot += attended * widen(query[d]);
  }
  return {add_lanes(found.square), add_lanes(found.dot)};
}

// Sums of the 16-bit rows of a long set, with attention as coefficients: in three parts, which are exact.
template <typename S>
using AttendedSums = PartTile<S, 48, 3>;

// The shared memory of a block of score_tile or score_long_tiles: products or sums of 16-bit rows, then the remaining
// arrays.
template <typename Tile>
struct ScoreMemory {
  static constexpr int kSumBytes = AttendedSums<Half>::kBytes;
  static constexpr int kFactors = Tile::kProductBytes > kSumBytes ? Tile::kProductBytes : kSumBytes;
  static constexpr int kFactorCount = kTileSets * Tile::kRows;
  static constexpr int kContextStarts = kFactors + kFactorCount * 4, kStartCount = kTileSets + 4;
  static constexpr int kQueryStarts = kContextStarts + kStartCount * 4;
  static constexpr int kColumnSets = kQueryStarts + kStartCount * 4;
  static constexpr int kBytes = kColumnSets + Tile::kColumns * 4;
};

// From the raw scores of a tile in shared memory to the scores of its pairs of sets. `options`: those of p, or the
// defaults.
template <typename Tile, typename S, typename Options>
ITM_FAST_DEVICE void score_products(const ScoreProblem<S>& p, const TileSets& contexts, const TileSets& queries,
                                    const Options& options) {
  using Memory = ScoreMemory<Tile>;
  constexpr int kStride = Tile::kScoreStride;
  ITM_FAST_DYNAMIC_SHARED(float, factors, Memory::kFactors, Memory::kFactorCount);
  ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
  ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
  ITM_FAST_DYNAMIC_SHARED(int32_t, column_sets, Memory::kColumnSets, Tile::kColumns);
  const int n_rows = context_starts[contexts.n_sets], n_columns = query_starts[queries.n_sets];
  const S* rows = p.contexts.values + contexts.first_row * p.dim;
  const S* columns = p.queries.values + queries.first_row * p.dim;
  ITM_FAST_TILE_SCORES(Tile);

  // A thread per context and query set: the factor of the row, from its scores with the queries of the set.
  for (int i = thread_index(); i < n_rows * queries.n_sets; i += Tile::kThreads) {
    const int row = i % n_rows, set = i / n_rows, first = query_starts[set], last = query_starts[set + 1];
    const auto raw = [&](int j) { return static_cast<float>(scores[row * kStride + first + j]); };
    if (last > first) factors[set * Tile::kRows + row] = row_factor(raw, last - first, options);
  }
  for (int set = thread_index(); set < queries.n_sets; set += Tile::kThreads) {
    const int last = query_starts[set + 1];
    for (int column = query_starts[set]; column < last; ++column) column_sets[column] = set;
  }
  barrier();

  // A thread per context set and two queries: attention and cosine, which takes the place of the column's first
  // element.
  constexpr int kTogether = 2;
  const int apart = (n_columns + 1) / kTogether, n_items = apart * contexts.n_sets;
  for (int first_item = warp() * 32; first_item < n_items; first_item += Tile::kThreads) {
    const int item = first_item + lane(), set = item / apart, column = item - set * apart;
    const int row = set < contexts.n_sets ? static_cast<int>(context_starts[set]) : 0;
    const int n = item < n_items ? context_starts[set + 1] - row : 0;
    // The second query may lie outside. It then repeats the first one, unused.
    const int last = column + apart < n_columns ? column + apart : column;
    const auto attention_of = [&](int first_row, int of_column) {
      return [&scores, first_row, of_column](int k) {
        return static_cast<float>(scores[(first_row + k) * kStride + of_column]);
      };
    };
    ColumnAttention sums[kTogether];
    AttendedNorm norms[kTogether];
    if (n > 0) {
      ITM_FAST_ROLLED
      for (int i = 0; i < kTogether; ++i) {
        const int of_column = i == 0 ? column : last;
        if (i > 0 && of_column == column) continue;  // Its attention has replaced the raw scores.
        const int factors_at = column_sets[of_column] * Tile::kRows + row;
        const auto factor = [&](int k) { return static_cast<float>(factors[factors_at + k]); };
        const auto store = [&](int k, float e) { scores[(row + k) * kStride + of_column] = e; };
        const ColumnAttention found = attend_column(attention_of(row, of_column), factor, store, n, options);
        if (i == 0) sums[0] = found;
        if (i != 0) sums[1] = found;
      }
      const auto attention = [&](int i, int k) {
        return static_cast<float>(scores[(row + k) * kStride + (i == 0 ? column : last)]);
      };
      find_attended_norms(norms, attention, p.grams + (contexts.first_row + row) * p.gram_width, n);
    }
    ITM_FAST_UNROLLED
    for (int i = 0; i < kTogether; ++i) {
      const int of_column = i == 0 ? column : last;
      const bool is_used = n > 0 && (i == 0 || last != column);
      const uint32_t lost = ballot(is_used && norms[i].is_lost());
      if (lost != 0) warp_sync();  // All lanes read the attention of a lost one.
      for (uint32_t rest = lost; rest != 0; rest &= rest - 1) {
        const int of_lane = count_bits((rest & (0u - rest)) - 1);
        const int its_row = shuffle(row, of_lane), its_column = shuffle(of_column, of_lane);
        const int its_n = shuffle(n, of_lane);
        const ExactAttention exact = attend_exactly(attention_of(its_row, its_column), rows + its_row * p.dim, its_n,
                                                    columns + its_column * p.dim, p.dim);
        if (lane() == of_lane) norms[i].square = exact.square;
        if (lane() == of_lane) sums[i].dot = exact.dot;
      }
      if (lost != 0) warp_sync();
      if (is_used) {
        const float query_norm = p.query_norms[queries.first_row + of_column];
        scores[row * kStride + of_column] = cosine_of(sums[i].dot, norms[i].square, sums[i].total, query_norm);
      }
    }
  }
  barrier();

  // One thread per pair of sets.
  for (int i = thread_index(); i < queries.n_sets * contexts.n_sets; i += Tile::kThreads) {
    const int set = i % contexts.n_sets, query = i / contexts.n_sets;
    const int row = context_starts[set], first = query_starts[query], last = query_starts[query + 1];
    CosineAggregate aggregate;
    if (context_starts[set + 1] > row) {
      for (int j = first; j < last; ++j) aggregate.add(scores[row * kStride + j], options);
    }
    const bool is_empty = context_starts[set + 1] == row || last == first;
    p.scores[score_place(p, queries.first_set + query, contexts.first_set + set)] =
        is_empty ? 0.0f : aggregate.result(last - first, options);
  }
}

// The scores of a tile of sets that all fit. Rows are contexts, columns are queries.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_short_sets(const ScoreProblem<S>& p, const TileSets& contexts, const TileSets& queries) {
  using Memory = ScoreMemory<Tile>;
  ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
  ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
  if (warp() == 0) find_starts(p.contexts, contexts, Tile::kRows, context_starts);
  if (warp() == Tile::kWarps - 1) find_starts(p.queries, queries, Tile::kColumns, query_starts);
  barrier();
  const int n_rows = context_starts[contexts.n_sets], n_columns = query_starts[queries.n_sets];
  const S* rows = p.contexts.values + contexts.first_row * p.dim;
  const S* columns = p.queries.values + queries.first_row * p.dim;
  if (n_rows > 0 && n_columns > 0) {
    multiply_tile<kParts, Tile>(RowRun<S>{rows, n_rows, p.dim}, RowRun<S>{columns, n_columns, p.dim}, p.dim,
                                p.is_aligned);
  }
  if (DefaultPairOptions::are(p.options)) {
    score_products<Tile>(p, contexts, queries, DefaultPairOptions(p.options));
  } else {
    score_products<Tile>(p, contexts, queries, p.options);
  }
}

// The scores of two tiles if one of them is a set that is longer than a tile.
template <typename Tile, typename S>
ITM_FAST_DEVICE_APART void score_long_sets(const ScoreProblem<S>& p, int64_t context_tile, int64_t query_tile) {
  const TileSets contexts = open_tile(p.contexts, p.context_tiles, context_tile, Tile::kRows);
  const TileSets queries = open_tile(p.queries, p.query_tiles, query_tile, Tile::kColumns);
  for (int i = 0; i < queries.n_sets * contexts.n_sets; ++i) {
    const int64_t query = queries.first_set + i / contexts.n_sets, context = contexts.first_set + i % contexts.n_sets;
    const float score = score_long_pair<Tile>(p.queries, query, p.contexts, context, p.dim, p.query_norms, p.options);
    if (thread_index() == 0) p.scores[score_place(p, query, context)] = score;
  }
}

template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_pair(const ScoreProblem<S>& p, const TilePair& tiles) {
  if (tiles.is_long()) {
    score_long_sets<Tile>(p, tiles.context_tile, tiles.query_tile);
  } else {
    score_short_sets<kParts, Tile>(p, tiles.contexts, tiles.queries);
  }
}

// The scores of one pair of tiles; returns at once if there are not as many. Grid of cross_attention_scores: a block
// per pair, up to the maximum number of pairs.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_tile(const ScoreProblem<S>& p, int64_t pair) {
  if (pair < tile_pairs(p)) score_pair<kParts, Tile>(p, open_pair<Tile>(p, pair));
}

}  // namespace itm_fast::cuda
