// maxsim_scores on a GPU: one launch for listed pairs, two for all pairs.
//
// For all pairs, the first launch packs the sets of both sides into tiles. In the scoring launch, a block takes a tile
// of contexts with a tile of queries, or one listed pair of sets. It multiplies their rows on tensor cores and reduces
// the products in shared memory: only scores leave the chip. A set that is longer than a tile takes several products,
// and a thread carries the best partner of its row from one to the next. The backward runs the same kernel to write the
// best partners instead of the scores. Of equal products the first row is the best; NaN is the greatest.
#pragma once

#include "itm_fast/cuda/score_tile.h"
#include "itm_fast/cuda/tile_pairs.h"
#include "itm_fast/cuda/tile_product.h"
#include "itm_fast/maxsim.h"

namespace itm_fast::cuda {

template <typename S>
struct MaxsimProblem {
  SetRows<S> queries, contexts;
  int64_t dim;
  MaxsimOptions options;
  bool is_aligned;       // rows are aligned to 16 bytes
  bool is_listed;        // or else all pairs
  const int64_t* pairs;  // (n_pairs, 2): query set and context set, clamped to the sets
  int64_t n_pairs;
  TilePlan query_tiles, context_tiles;  // for all pairs
  float* scores;                        // (query sets, context sets), or (n_pairs,); null: write the best partners of
  const float* gradients;               // the pairs with a non-zero incoming gradient
  int32_t* best_contexts;               // (context sets, query rows): of each query row, if the direction needs it
  int32_t* best_queries;                // (query sets, context rows)
  // Of listed pairs, if they take less: best_contexts (n_pairs, query_slot), best_queries (n_pairs, context_slot). Sets
  // with more rows have no best partners, and their gradients are NaN. 0: by sets.
  int64_t query_slot, context_slot;
};

// The best partners of the rows of a set in a set of the other side: where they begin, and how many there is room for.
struct PartnerRange {
  int64_t begin, room;
};

// `number`: of the listed pair. `of_queries`: in best_contexts.
template <typename S>
ITM_FAST_DEVICE PartnerRange partner_range(const MaxsimProblem<S>& p, bool of_queries, int64_t first_row,
                                           int64_t other_set, int64_t number) {
  const int64_t slot = of_queries ? p.query_slot : p.context_slot;
  const int64_t n_rows = of_queries ? p.queries.n_rows : p.contexts.n_rows;
  if (slot > 0) return {number * slot, slot};
  return {other_set * n_rows + first_row, n_rows - first_row};
}

// Two blocks of one launch.
template <typename Tile, typename S>
ITM_FAST_DEVICE void plan_maxsim(const MaxsimProblem<S>& p) {
  if (block_index() == 0) {
    plan_tiles<Tile::kWindow>(p.contexts, Tile::kRows, p.context_tiles);
  } else {
    plan_tiles<Tile::kWindow>(p.queries, Tile::kColumns, p.query_tiles);
  }
}

// The sets of listed pair `number`.
struct MaxsimPair {
  int64_t query, context;
};

template <typename S>
ITM_FAST_DEVICE MaxsimPair maxsim_pair(const MaxsimProblem<S>& p, int64_t number) {
  // -1 if there are no sets.
  const auto clamped = [](int64_t set, int64_t n_sets) {
    const int64_t least = set < 0 ? 0 : set;
    return least < n_sets ? least : n_sets - 1;
  };
  return {clamped(p.pairs[2 * number], p.queries.n_sets), clamped(p.pairs[2 * number + 1], p.contexts.n_sets)};
}

// The shared memory of a block: the products, then these arrays.
template <typename Tile>
struct MaxsimMemory {
  static constexpr int kRowMaxima = Tile::kProductBytes, kRowMaximaCount = kTileSets * Tile::kRows;
  static constexpr int kContextStarts = kRowMaxima + kRowMaximaCount * 4, kStartCount = kTileSets + 4;
  static constexpr int kQueryStarts = kContextStarts + kStartCount * 4;
  static constexpr int kBytes = kQueryStarts + kStartCount * 4;
};

struct BestPartner {
  float product = -infinity<float>();
  int32_t row = 0;

  ITM_FAST_DEVICE void add(float given, int32_t at) {
    if (given > product || (given != given && product == product)) {
      product = given;
      row = at;
    }
  }
};

template <typename Tile, typename S>
class MaxsimTile {
  using Memory = MaxsimMemory<Tile>;
  static constexpr int kStride = Tile::kScoreStride;
  static_assert(Tile::kRows <= Tile::kThreads && Tile::kColumns <= Tile::kThreads);  // see `carried`

 public:
  // `pair`: the listed pair, if pairs are listed.
  ITM_FAST_DEVICE MaxsimTile(const MaxsimProblem<S>& p, const TileSets& contexts, const TileSets& queries, int64_t pair)
      : p_(p), contexts_(contexts), queries_(queries), pair_(pair) {}

  ITM_FAST_DEVICE bool has_gradient() const {
    bool any = false;
    for (int i = lane(); i < queries_.n_sets * contexts_.n_sets; i += 32) {
      any = any || p_.gradients[place(i / contexts_.n_sets, i % contexts_.n_sets)] != 0.0f;
    }
    return vote_any(any);
  }

  // Products are taken with the pieces of the contexts inside of the chunks of the queries, or the other way round. A
  // direction is complete in each product if the other side has one part. Otherwise its own side is outside. If both
  // sides have several parts, each direction has its own pass.
  template <int kParts>
  ITM_FAST_DEVICE void run() {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    if (warp() == 0) find_starts(p_.contexts, contexts_, Tile::kRows, context_starts);
    if (warp() == Tile::kWarps - 1) find_starts(p_.queries, queries_, Tile::kColumns, query_starts);
    barrier();
    const int64_t n_rows = rows_of(p_.contexts, contexts_, context_starts);
    const int64_t n_columns = rows_of(p_.queries, queries_, query_starts);
    const int64_t pieces = tiles_of(n_rows, Tile::kRows), chunks = tiles_of(n_columns, Tile::kColumns);
    const bool by_queries = p_.options.by_queries(), by_contexts = p_.options.by_contexts();
    const bool chunks_outside = by_queries && (!by_contexts || chunks == 1 || pieces > 1);
    const bool pieces_outside = by_contexts && !(chunks_outside && chunks == 1);
    const int64_t products = pieces * chunks;
    BestPartner carried;
    for (int64_t step = chunks_outside ? 0 : products; step < (pieces_outside ? 2 * products : products); ++step) {
      const bool is_first_pass = step < products;
      const int64_t at = is_first_pass ? step : step - products;
      const int64_t piece = is_first_pass ? at % pieces : at / chunks,
                    chunk = is_first_pass ? at / pieces : at % chunks;
      const Part rows{piece * Tile::kRows, part_of(n_rows - piece * Tile::kRows, Tile::kRows), piece == 0,
                      piece + 1 == pieces};
      const Part columns{chunk * Tile::kColumns, part_of(n_columns - chunk * Tile::kColumns, Tile::kColumns),
                         chunk == 0, chunk + 1 == chunks};
      if (rows.count > 0 && columns.count > 0) {
        const S* first_row = p_.contexts.values + (contexts_.first_row + rows.first) * p_.dim;
        const S* first_column = p_.queries.values + (queries_.first_row + columns.first) * p_.dim;
        multiply_tile<kParts, Tile>(RowRun<S>{first_row, rows.count, p_.dim},
                                    RowRun<S>{first_column, columns.count, p_.dim}, p_.dim, p_.is_aligned);
      }
      const bool folds_rows = by_contexts && (!is_first_pass || chunks == 1);
      const bool folds_columns = by_queries && (is_first_pass || !chunks_outside);
      if (folds_rows) fold<false>(rows, columns, query_starts, carried);
      barrier();  // The maxima of columns are written over products.
      if (folds_columns) fold<true>(columns, rows, context_starts, carried);
      barrier();
      const bool rows_end = folds_rows && columns.is_last, columns_end = folds_columns && rows.is_last;
      if (p_.scores != nullptr && (rows_end || columns_end)) {
        add_up(rows, columns, rows_end, columns_end, context_starts, query_starts);
        barrier();  // The next product takes the place of the maxima.
      }
    }
  }

 private:
  // The rows of one side that a product takes, counted from the first of the tile's.
  struct Part {
    int64_t first;
    int count;
    bool is_first, is_last;
  };

  ITM_FAST_DEVICE static int part_of(int64_t left, int most) { return static_cast<int>(left < most ? left : most); }

  ITM_FAST_DEVICE static int64_t rows_of(const SetRows<S>& sets, const TileSets& tile, SharedArray<int32_t> starts) {
    return tile.is_long ? sets.length(tile.first_set) : static_cast<int64_t>(starts[tile.n_sets]);
  }

  // Where a set of a tile begins in its part. The last part of a long set is shorter than its first.
  ITM_FAST_DEVICE static int start_of(SharedArray<int32_t> starts, int set, const Part& part) {
    const int start = starts[set];
    return start < part.count ? start : part.count;
  }

  ITM_FAST_DEVICE int64_t place(int query, int context) const {
    return p_.is_listed ? pair_ : (queries_.first_set + query) * p_.contexts.n_sets + contexts_.first_set + context;
  }

  // The best partner of each row of `own` in every set of the other side: to p.best_contexts or p.best_queries, or its
  // product to shared memory. For columns, that is the place of the first product that was compared.
  template <bool kOfColumns>
  ITM_FAST_DEVICE void fold(const Part& own, const Part& others, SharedArray<int32_t> starts,
                            BestPartner& carried) const {
    ITM_FAST_TILE_SCORES(Tile);
    ITM_FAST_DYNAMIC_SHARED(float, row_maxima, Memory::kRowMaxima, Memory::kRowMaximaCount);
    const TileSets& own_sets = kOfColumns ? queries_ : contexts_;
    const TileSets& other_sets = kOfColumns ? contexts_ : queries_;
    int32_t* const written = kOfColumns ? p_.best_contexts : p_.best_queries;
    for (int i = thread_index(); i < own.count * other_sets.n_sets; i += Tile::kThreads) {
      const int row = i % own.count, set = i / own.count;
      const int first = start_of(starts, set, others), last = start_of(starts, set + 1, others);
      if (first == last) continue;
      BestPartner best;
      if (!others.is_first) best = carried;  // A long set is alone in its tile: a thread has one row.
      for (int k = first; k < last; ++k) {
        best.add(scores[kOfColumns ? k * kStride + row : row * kStride + k],
                 static_cast<int32_t>(others.first) + k - first);
      }
      if (!others.is_last) {
        carried = best;
      } else if (p_.scores == nullptr) {
        const PartnerRange range = partner_range(p_, kOfColumns, own_sets.first_row, other_sets.first_set + set, pair_);
        if (own.first + row < range.room) written[range.begin + own.first + row] = best.row;
      } else if (kOfColumns) {
        scores[first * kStride + row] = best.product;
      } else {
        row_maxima[set * Tile::kRows + row] = best.product;
      }
    }
  }

  // Adds the maxima of a product to the scores: a warp per pair of sets.
  ITM_FAST_DEVICE void add_up(const Part& rows, const Part& columns, bool adds_rows, bool adds_columns,
                              SharedArray<int32_t> context_starts, SharedArray<int32_t> query_starts) {
    ITM_FAST_TILE_SCORES(Tile);
    ITM_FAST_DYNAMIC_SHARED(float, row_maxima, Memory::kRowMaxima, Memory::kRowMaximaCount);
    for (int i = warp(); i < queries_.n_sets * contexts_.n_sets; i += Tile::kWarps) {
      const int query = i / contexts_.n_sets, context = i % contexts_.n_sets;
      const int row = start_of(context_starts, context, rows), row_end = start_of(context_starts, context + 1, rows);
      const int column = start_of(query_starts, query, columns),
                column_end = start_of(query_starts, query + 1, columns);
      float of_columns = 0.0f, of_rows = 0.0f;
      if (row < row_end && column < column_end) {
        for (int c = column + lane(); adds_columns && c < column_end; c += 32) of_columns += scores[row * kStride + c];
        for (int r = row + lane(); adds_rows && r < row_end; r += 32) of_rows += row_maxima[query * Tile::kRows + r];
      }
      for (int half = 16; half > 0; half /= 2) {
        of_columns += shuffle_xor(of_columns, half);
        of_rows += shuffle_xor(of_rows, half);
      }
      if (lane() != 0) continue;
      if (p_.options.reduction == MaxsimReduction::mean && row < row_end && column < column_end) {
        of_columns /= static_cast<float>(p_.queries.length(queries_.first_set + query));
        of_rows /= static_cast<float>(p_.contexts.length(contexts_.first_set + context));
      }
      float& score = p_.scores[place(query, context)];
      score = (is_written_ ? score : 0.0f) + of_columns + of_rows;
    }
    is_written_ = true;
  }

  const MaxsimProblem<S>& p_;
  const TileSets contexts_, queries_;
  const int64_t pair_;
  bool is_written_ = false;
};

// Grid: a block per listed pair, or per pair of tiles up to the maximum number of them.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void score_maxsim(const MaxsimProblem<S>& p) {
  TileSets contexts, queries;
  if (p.is_listed) {
    const MaxsimPair pair = maxsim_pair(p, block_index());
    contexts = one_set(p.contexts, pair.context, Tile::kRows);
    queries = one_set(p.queries, pair.query, Tile::kColumns);
  } else {
    if (block_index() >= tile_pairs(p)) return;
    const TilePair tiles = open_pair<Tile>(p, block_index());
    contexts = tiles.contexts;
    queries = tiles.queries;
  }
  MaxsimTile<Tile, S> tile(p, contexts, queries, block_index());
  if (p.scores == nullptr && !tile.has_gradient()) return;
  tile.template run<kParts>();
}

}  // namespace itm_fast::cuda
