// The gradient of the scores of a tile of context sets with a tile of query sets, by one block in shared memory: step 2
// of backpropagate_blocks. See pair_recompute.h and pair_gradient.h for the steps.
#pragma once

#include "itm_fast/cuda/block_plan.h"
#include "itm_fast/cuda/pair_gradient.h"

namespace itm_fast::cuda {

template <typename S>
class BlockScores {
  using Memory = BlockMemory;
  static constexpr int kStride = Memory::kStride, kThreads = BlockTile::kThreads;

 public:
  ITM_FAST_DEVICE BlockScores(const CrossAttentionBackward<S>& p, const BlockChunk<S>& chunk, int64_t context_tile,
                              int64_t query_tile)
      : p_(p),
        chunk_(chunk),
        context_tile_(context_tile - chunk.contexts.first_tile),
        query_tile_(query_tile - chunk.queries.first_tile),
        contexts_(open_tile(p.lists.contexts, p.context_tiles, context_tile, BlockTile::kRows)),
        queries_(open_tile(p.lists.queries, p.query_tiles, query_tile, BlockTile::kColumns)),
        first_row_(static_cast<int>(contexts_.first_row - chunk.contexts.first_row)),
        first_column_(static_cast<int>(queries_.first_row - chunk.queries.first_row)) {}

  ITM_FAST_DEVICE void differentiate() {
    open();
    const bool fits = n_columns_ * contexts_.n_sets <= Memory::kItems;
    if (!fits) *p_.unsuitable = 1;
    if (fits && n_rows_ > 0 && n_columns_ > 0) differentiate_sets();
    if (fits) store_sums();  // Zeros if one side of the tile has empty sets only.
    barrier();               // The next tile takes the place of all of this.
  }

 private:
  ITM_FAST_DEVICE void differentiate_sets() const {
    multiply_tile<kSetParts<S>, BlockTile>(RowRun<S>{rows(), n_rows_, p_.dim}, RowRun<S>{columns(), n_columns_, p_.dim},
                                           p_.dim, p_.is_aligned);
    with_options(p_.options, [&](const auto& options) { attend(options); });
    multiply_by_grams();
    compare();
    with_options(p_.options, [&](const auto& options) {
      differentiate_columns(options);
      differentiate_rows(options);
    });
    store_weights();
  }

  ITM_FAST_DEVICE const S* rows() const { return p_.lists.contexts.values + contexts_.first_row * p_.dim; }
  ITM_FAST_DEVICE const S* columns() const { return p_.lists.queries.values + queries_.first_row * p_.dim; }

  // Where the sets begin, and which set a row or column is of.
  ITM_FAST_DEVICE void open() {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, BlockTile::kRows);
    ITM_FAST_DYNAMIC_SHARED(int32_t, column_sets, Memory::kColumnSets, BlockTile::kColumns);
    if (warp() == 0) find_starts(p_.lists.contexts, contexts_, BlockTile::kRows, context_starts);
    if (warp() == 1) find_starts(p_.lists.queries, queries_, BlockTile::kColumns, query_starts);
    barrier();
    n_rows_ = context_starts[contexts_.n_sets];
    n_columns_ = query_starts[queries_.n_sets];
    for (int set = thread_index(); set < contexts_.n_sets; set += kThreads) {
      for (int row = context_starts[set]; row < context_starts[set + 1]; ++row) row_sets[row] = set;
    }
    for (int set = thread_index(); set < queries_.n_sets; set += kThreads) {
      for (int column = query_starts[set]; column < query_starts[set + 1]; ++column) column_sets[column] = set;
    }
  }

  // Calls body(set, column, first row of the set, its rows) for the items, one per thread.
  template <typename Body>
  ITM_FAST_DEVICE void each_item(const Body& body) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    for (int item = thread_index(); item < n_columns_ * contexts_.n_sets; item += kThreads) {
      const int set = item / n_columns_, row = context_starts[set], n = context_starts[set + 1] - row;
      if (n > 0) body(set, item % n_columns_, row, n);
    }
  }
  // Calls body(row, query set, its first column, its columns), one per thread.
  template <typename Body>
  ITM_FAST_DEVICE void each_row(const Body& body) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    for (int i = thread_index(); i < n_rows_ * queries_.n_sets; i += kThreads) {
      const int set = i / n_rows_, first = query_starts[set], n = query_starts[set + 1] - first;
      if (n > 0) body(i % n_rows_, set, first, n);
    }
  }
  // Calls body(set, its first row, its rows, number of the part), for count(rows) parts of each set, and for all
  // `across` of each part, one per thread.
  template <typename Count, typename Body>
  ITM_FAST_DEVICE void each_part(int across, const Count& count, const Body& body) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    int set = 0, before = 0;  // parts of the sets before this one
    for (int i = thread_index();; i += kThreads) {
      while (set < contexts_.n_sets) {
        const int more = count(context_starts[set + 1] - context_starts[set]);
        if (i / across - before < more) break;
        before += more;
        ++set;
      }
      if (set == contexts_.n_sets) return;
      const int row = context_starts[set];
      body(set, row, context_starts[set + 1] - row, i / across - before, i % across);
    }
  }

  // Attention in place of nothing: one thread per row, then per item.
  template <typename Options>
  ITM_FAST_DEVICE void attend(const Options& options) const {
    ITM_FAST_TILE_SCORES(BlockTile);
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, factors, Memory::kFactors, Memory::kFactorCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, column_sets, Memory::kColumnSets, BlockTile::kColumns);
    each_row([&](int row, int set, int first, int n) {
      const auto raw = [&](int j) { return static_cast<float>(scores[row * kStride + first + j]); };
      factors[set * BlockTile::kRows + row] = row_factor(raw, n, options);
    });
    barrier();
    const ExactOptions<Options> exact(options);
    each_item([&](int, int column, int row, int n) {
      const int factors_at = column_sets[column] * BlockTile::kRows + row, at = row * kStride + column;
      const float total = attend_column([&](int k) { return static_cast<float>(scores[at + k * kStride]); },
                                        [&](int k) { return static_cast<float>(factors[factors_at + k]); },
                                        [&](int k, float e) { attention[at + k * kStride] = e; }, n, exact)
                              .total;
      for (int k = 0; k < n; ++k) attention[at + k * kStride] = attention[at + k * kStride] / total;
    });
    barrier();
  }

  // mixed = G p: a thread per column and eight rows of a set.
  ITM_FAST_DEVICE void multiply_by_grams() const {
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, mixed, Memory::kMixed, Memory::kMatrix);
    each_part(
        n_columns_, [](int n) { return gram_stride(n) / kGramBlock; },
        [&](int set, int row, int n, int part, int column) {
          const int stride = gram_stride(n), first = part * kGramBlock;
          const float* gram = float_gram(p_, contexts_.first_set + set) + first;
          float sums[kGramBlock] = {};
          for (int l = 0; l < n; ++l) {
            const float e = attention[(row + l) * kStride + column];
            ITM_FAST_UNROLLED
            for (int four = 0; four < kGramBlock; four += 4) {
              float loaded[4];
              load_four(loaded, gram + l * stride + four);
              for (int i = 0; i < 4; ++i) sums[four + i] += loaded[i] * e;
            }
          }
          ITM_FAST_UNROLLED
          for (int i = 0; i < kGramBlock; ++i) {
            if (first + i < n) mixed[(row + first + i) * kStride + column] = sums[i];
          }
        });
    barrier();
  }

  // The cosines. Refuses attended vectors that cancel, and numbers that are not finite: they would reach other pairs.
  ITM_FAST_DEVICE void compare() const {
    ITM_FAST_TILE_SCORES(BlockTile);
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, mixed, Memory::kMixed, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, cosines, Memory::kCosines, Memory::kItems);
    bool is_refused = false;
    each_item([&](int set, int column, int row, int n) {
      const float* gram = float_gram(p_, contexts_.first_set + set);
      const int stride = gram_stride(n);
      float dot = 0.0f;
      AttendedNorm norm;
      for (int k = 0; k < n; ++k) {
        const int at = (row + k) * kStride + column;
        const float e = attention[at];
        dot += e * scores[at];
        norm.square += e * mixed[at];
        norm.scale += e * sqrtf(gram[k * stride + k]);
      }
      const float product = dot + norm.square;
      is_refused = is_refused || norm.is_lost() || !(product - product == 0.0f);
      const int item = set * n_columns_ + column;
      dots[item] = dot;
      squares[item] = norm.square;
      cosines[item] = cosine_of(dot, norm.square, 1.0f, p_.query_norms[queries_.first_row + column]);
    });
    if (is_refused) *p_.unsuitable = 1;
    barrier();
  }

  // Through the aggregate, the cosines and the softmax over the contexts: `mixed` becomes the gradient of the logits.
  template <typename Options>
  ITM_FAST_DEVICE void differentiate_columns(const Options& options) const {
    ITM_FAST_TILE_SCORES(BlockTile);
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, mixed, Memory::kMixed, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, cosines, Memory::kCosines, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, norms, Memory::kNorms, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(int32_t, query_starts, Memory::kQueryStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, column_sets, Memory::kColumnSets, BlockTile::kColumns);
    each_item([&](int set, int column, int row, int n) {
      const int query = column_sets[column], first = query_starts[query], item = set * n_columns_ + column;
      const float of_pair = p_.lists.gradients.at(queries_.first_set + query, contexts_.first_set + set);
      const auto cosine = [&](int j) { return static_cast<float>(cosines[set * n_columns_ + first + j]); };
      const float incoming = cosine_gradient(cosine, column - first, query_starts[query + 1] - first, of_pair, options);
      const CosineFactors factors(incoming, cosine(column - first), squares[item],
                                  p_.query_norms[queries_.first_row + column]);
      dots[item] = factors.dot;
      squares[item] = factors.square;
      norms[item] = factors.norm;
      if (options.is_hard()) return;  // Hard attention is a constant.
      float along = 0.0f;
      for (int k = 0; k < n; ++k) {
        const int at = (row + k) * kStride + column;
        const float gradient = factors.dot * scores[at] + factors.square * mixed[at];
        mixed[at] = gradient;
        along += attention[at] * gradient;
      }
      for (int k = 0; k < n; ++k) {
        const int at = (row + k) * kStride + column;
        mixed[at] = attention[at] * (mixed[at] - along);
      }
    });
    barrier();
  }

  // Through the normalisation over the queries and the clip: the raw scores become their gradients.
  template <typename Options>
  ITM_FAST_DEVICE void differentiate_rows(const Options& options) const {
    ITM_FAST_TILE_SCORES(BlockTile);
    ITM_FAST_DYNAMIC_SHARED(float, mixed, Memory::kMixed, Memory::kMatrix);
    each_row([&](int row, int, int first, int n) {
      const int at = row * kStride + first;
      const auto raw = [&](int j) { return static_cast<float>(scores[at + j]); };
      const auto store = [&](int j, float gradient) { scores[at + j] = gradient; };
      if (options.is_hard()) {
        for (int j = 0; j < n; ++j) store(j, 0.0f);
        return;
      }
      RowStatistics statistics;
      for (int j = 0; j < n; ++j) statistics.add(raw(j), options);
      const auto logit = [&](int j) { return static_cast<float>(mixed[at + j]); };
      differentiate_row(raw, logit, store, n, RowNorm(statistics, options), options);
    });
    barrier();
  }

  // W and its transpose: a row of the result at a time, so that stores are adjacent.
  ITM_FAST_DEVICE void store_weights() const {
    ITM_FAST_TILE_SCORES(BlockTile);
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, BlockTile::kRows);
    for (int i = thread_index(); i < n_rows_ * n_columns_; i += kThreads) {
      const int row = i / n_columns_, column = i % n_columns_, at = row * kStride + column;
      const float weight = scores[at] + dots[row_sets[row] * n_columns_ + column] * attention[at];
      scores[at] = weight;
      if (p_.query_gradients != nullptr) chunk_.turned.store(first_row_ + row, first_column_ + column, weight);
    }
    if (p_.context_gradients == nullptr) return;
    barrier();
    for (int i = thread_index(); i < n_rows_ * n_columns_; i += kThreads) {
      const int row = i % n_rows_, column = i / n_rows_;
      chunk_.weights.store(first_column_ + column, first_row_ + row, scores[row * kStride + column]);
    }
  }

  // The tile's terms of M and of the factors of its queries. M is symmetric: a thread sums 4 x 4 terms on the diagonal
  // or to its right.
  ITM_FAST_DEVICE void store_sums() const {
    constexpr int kSide = 4;
    ITM_FAST_DYNAMIC_SHARED(float, attention, Memory::kAttention, Memory::kMatrix);
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(float, norms, Memory::kNorms, Memory::kItems);
    ITM_FAST_DYNAMIC_SHARED(int32_t, context_starts, Memory::kContextStarts, Memory::kStartCount);
    if (p_.query_gradients != nullptr) {
      for (int column = thread_index(); column < n_columns_; column += kThreads) {
        float sum = 0.0f;
        for (int set = 0; set < contexts_.n_sets; ++set) {
          if (context_starts[set + 1] > context_starts[set]) sum += norms[set * n_columns_ + column];
        }
        chunk_.norms[context_tile_ * padded_parts(chunk_.queries.n_rows) + first_column_ + column] = sum;
      }
    }
    if (p_.context_gradients == nullptr) return;
    float* terms = chunk_.squares_of(1 + query_tile_);
    const auto sides = [](int n) { return (n + kSide - 1) / kSide; };
    each_part(
        1, [&](int n) { return sides(n) * (sides(n) + 1) / 2; },
        [&](int set, int row, int n, int part, int) {
          int above = 0;  // rows of 4 x 4 terms above the thread's, which begin on the diagonal
          while (part >= sides(n) - above) part -= sides(n) - above++;
          const int first_k = above * kSide, first_l = (above + part) * kSide;
          int left[kSide], right[kSide];  // past the end, the last row again
          for (int i = 0; i < kSide; ++i) {
            left[i] = (row + (first_k + i < n ? first_k + i : n - 1)) * kStride;
            right[i] = (row + (first_l + i < n ? first_l + i : n - 1)) * kStride;
          }
          float sums[kSide][kSide] = {};
          for (int column = 0; column < n_columns_; ++column) {
            const float square = squares[set * n_columns_ + column];
            float l[kSide];
            for (int i = 0; i < kSide; ++i) l[i] = attention[right[i] + column];
            for (int i = 0; i < kSide; ++i) {
              const float k = attention[left[i] + column] * square;
              for (int e = 0; e < kSide; ++e) sums[i][e] += k * l[e];
            }
          }
          const auto store = [&](int k, int l, float term) {
            terms[int64_t{first_row_ + row + k} * chunk_.width + l] = term;
          };
          for (int i = 0; i < kSide && first_k + i < n; ++i) {
            for (int e = 0; e < kSide && first_l + e < n; ++e) {
              store(first_k + i, first_l + e, sums[i][e]);
              if (first_l > first_k) store(first_l + e, first_k + i, sums[i][e]);
            }
          }
        });
  }

  const CrossAttentionBackward<S>& p_;
  const BlockChunk<S>& chunk_;
  int64_t context_tile_, query_tile_;  // in the chunk
  TileSets contexts_, queries_;
  int first_row_, first_column_;  // in the chunk
  int n_rows_ = 0, n_columns_ = 0;
};

// A separate function, so that its registers are its own.
template <typename S>
ITM_FAST_DEVICE_APART void differentiate_scores(const CrossAttentionBackward<S>& p, const BlockChunk<S>& chunk,
                                                int64_t context_tile, int64_t query_tile) {
  BlockScores<S>(p, chunk, context_tile, query_tile).differentiate();
}

}  // namespace itm_fast::cuda
