// The score of a pair of sets if one is longer than a tile: computed by one block, without tensor cores.
//
// It processes kLongColumns queries at a time with a piece of the contexts, as many contexts as fit. If one piece holds
// all contexts, its raw scores are computed once per run of queries, and once more for the factors of the rows, which
// depend on all runs. Otherwise every step of the softmax and of the focal mode recomputes every piece. The attended
// vectors are formed, one element of each per thread.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

inline constexpr int kLongColumns = 16;

// A block's shared memory.
template <typename Tile>
struct LongMemory {
  static constexpr int kPiece = Tile::kProductBytes / (kLongColumns * 4);  // contexts
  static constexpr int kFactors = kPiece * kLongColumns * 4, kPeaks = kFactors + kPiece * 4;
  static constexpr int kSums = kPeaks + kPiece * 4;  // per warp and query: |c|^2 and <q, c>
  static constexpr int kCosines = kSums + Tile::kWarps * kLongColumns * 2 * 4;
  static constexpr int kBytes = kCosines + kLongColumns * 4;
};

// Sums every lane's kLongColumns numbers over the warp; a lane receives column lane / 2.
ITM_FAST_DEVICE float add_columns(float (&numbers)[kLongColumns]) {
  for (int half = kLongColumns / 2; half > 0; half /= 2) {
    const bool takes_upper = (lane() & half * 2) != 0;
    for (int i = 0; i < half; ++i) {
      const float given = takes_upper ? numbers[i] : numbers[i + half];
      const float kept = takes_upper ? numbers[i + half] : numbers[i];
      numbers[i] = kept + shuffle_xor(given, half * 2);
    }
  }
  return numbers[0] + shuffle_xor(numbers[0], 1);
}

template <typename Tile, typename S>
class LongPair {
  using Memory = LongMemory<Tile>;

 public:
  ITM_FAST_DEVICE LongPair(const S* queries, int n_queries, const S* contexts, int n_contexts, int dim,
                           const float* query_norms, const PairOptions& options)
      : queries_(queries),
        contexts_(contexts),
        n_queries_(n_queries),
        n_contexts_(n_contexts),
        dim_(dim),
        query_norms_(query_norms),
        options_(options),
        pieces_((n_contexts + Memory::kPiece - 1) / Memory::kPiece),
        runs_((n_queries + kLongColumns - 1) / kLongColumns) {}

  // The first thread returns the score.
  ITM_FAST_DEVICE float score() {
    ITM_FAST_DYNAMIC_SHARED(float, long_cosines, Memory::kCosines, kLongColumns);
    CosineAggregate aggregate;
    for (int run = 0; run < runs_; ++run) {
      write_cosines(run);
      if (thread_index() == 0) {
        for (int j = 0; j < columns_of(run); ++j) aggregate.add(long_cosines[j], options_);
      }
      barrier();  // Before the next cosines are written.
    }
    return aggregate.result(n_queries_, options_);
  }

 private:
  ITM_FAST_DEVICE int columns_of(int run) const { return part_of(n_queries_ - run * kLongColumns, kLongColumns); }
  ITM_FAST_DEVICE int rows_of(int piece) const { return part_of(n_contexts_ - piece * Memory::kPiece, Memory::kPiece); }
  // Within a run, offsets fit 32 bits.
  ITM_FAST_DEVICE const S* first_query(int run) const { return queries_ + int64_t{run} * kLongColumns * dim_; }
  ITM_FAST_DEVICE static int part_of(int left, int most) { return left < most ? left : most; }

  // Raw scores of a piece with a run of queries: a warp per context, lanes over the dimensions. Ends with a barrier.
  ITM_FAST_DEVICE void multiply(int piece, int run) {
    ITM_FAST_DYNAMIC_SHARED(float, long_scores, 0, Memory::kPiece* kLongColumns);
    const int columns = columns_of(run);
    barrier();  // Whatever was there has been read.
    for (int k = warp(); k < rows_of(piece); k += Tile::kWarps) {
      const S* context = contexts_ + int64_t{piece * Memory::kPiece + k} * dim_;
      const S* query = first_query(run);
      float sums[kLongColumns] = {};
      for (int d = lane(); d < dim_; d += 32) {
        const float x = widen(context[d]);
        for (int j = 0; j < kLongColumns; ++j) {
          if (j < columns) sums[j] += x * widen(query[j * dim_ + d]);
        }
      }
      const float score = add_columns(sums);
      if (lane() % 2 == 0) long_scores[k * kLongColumns + lane() / 2] = score;
    }
    barrier();
  }

  // Computes raw scores and the factors of their rows, the input of a run's steps.
  ITM_FAST_DEVICE void open(int piece, int run) {
    ITM_FAST_DYNAMIC_SHARED(float, long_scores, 0, Memory::kPiece* kLongColumns);
    ITM_FAST_DYNAMIC_SHARED(float, long_factors, Memory::kFactors, Memory::kPiece);
    ITM_FAST_DYNAMIC_SHARED(float, long_peaks, Memory::kPeaks, Memory::kPiece);
    if (piece == open_piece_ && run == open_run_) return;
    // The factors of the rows depend on all queries; until they are complete, their totals are stored in their place.
    // The requested run comes last and stays.
    const bool needs_factors = piece != factors_of_;
    for (int i = needs_factors ? 0 : runs_ - 1; i < runs_; ++i) {
      const int each = (run + 1 + i) % runs_;
      multiply(piece, each);
      for (int k = thread_index(); k < rows_of(piece) && needs_factors; k += Tile::kThreads) {
        RowStatistics statistics;
        if (i > 0) statistics = {long_factors[k], long_peaks[k]};
        for (int j = 0; j < columns_of(each); ++j) statistics.add(long_scores[k * kLongColumns + j], options_);
        long_factors[k] = i + 1 < runs_ ? statistics.total : statistics.factor(options_);
        long_peaks[k] = statistics.peak;
      }
    }
    factors_of_ = piece;
    barrier();  // The factors have been written, and the statistics read.
    open_piece_ = piece;
    open_run_ = run;
  }

  // The steps to the attention of a run, each over all pieces; the dimensions of the attended vectors follow.
  enum Step { kPeak, kTotal, kRule, kAny, kAttend };

  ITM_FAST_DEVICE bool is_needed(int step) const {
    if (step == kPeak) return !options_.small_logits || options_.is_hard();
    return step >= kAttend || (options_.focal != Focal::none && !options_.is_hard());
  }

  ITM_FAST_DEVICE void write_cosines(int run) {
    ITM_FAST_DYNAMIC_SHARED(float, long_scores, 0, Memory::kPiece* kLongColumns);
    ITM_FAST_DYNAMIC_SHARED(float, long_factors, Memory::kFactors, Memory::kPiece);
    GreatestLogit peak;
    float focal_total = 0.0f, total = 0.0f;
    FocalRule rule;
    bool any = false;
    const int dim_steps = (dim_ + Tile::kThreads - 1) / Tile::kThreads;
    for (int step = kPeak; step < kAttend + dim_steps; ++step) {
      if (!is_needed(step < kAttend ? step : kAttend)) continue;
      if (step == kRule) rule.total = focal_total;
      if (step == kAny) rule.drops = true;
      if (step == kAttend) rule.drops = any;
      float attended[kLongColumns] = {};
      for (int piece = 0; piece < pieces_; ++piece) {
        // A single piece keeps its attention from one step to the next.
        if (step <= kAttend || pieces_ > 1) {
          open(piece, run);
          for (int k = 0; k < rows_of(piece) && thread_index() < columns_of(run); ++k) {
            const int at = k * kLongColumns + thread_index();
            const float x = logit(long_scores[at], long_factors[k], options_);
            const int place = piece * Memory::kPiece + k;
            if (step == kPeak) {
              peak.add(x, place);
              continue;
            }
            float e = options_.is_hard() ? (place == peak.place ? 1.0f : 0.0f) : expf(x - peak.value);
            if (step == kTotal) focal_total += e;
            if (step == kRule) rule.add(e, options_.focal);
            if (step == kAny) any = any || rule.keeps(e);
            if (step >= kAttend) {
              if (!rule.keeps(e)) e = 0.0f;
              if (step == kAttend) total += e;
              long_scores[at] = e;
            }
          }
        }
        if (step >= kAttend) {
          open_piece_ = -1;
          barrier();
          attend(piece, run, (step - kAttend) * Tile::kThreads + thread_index(), attended);
        }
      }
      if (step >= kAttend) add_dimensions(run, step - kAttend, attended);
    }
    finish(run, total);
  }

  // Adds a piece to one element of the attended vectors.
  ITM_FAST_DEVICE void attend(int piece, int run, int d, float (&attended)[kLongColumns]) const {
    ITM_FAST_DYNAMIC_SHARED(float, long_scores, 0, Memory::kPiece* kLongColumns);
    const int columns = columns_of(run);
    for (int k = 0; k < rows_of(piece) && d < dim_; ++k) {
      const float x = widen(contexts_[int64_t{piece * Memory::kPiece + k} * dim_ + d]);
      for (int j = 0; j < kLongColumns; ++j) {
        if (j < columns) attended[j] += static_cast<float>(long_scores[k * kLongColumns + j]) * x;
      }
    }
  }

  // Adds the warp's elements of the attended vectors to its part of |c|^2 and <q, c>.
  ITM_FAST_DEVICE void add_dimensions(int run, int dim_step, const float (&attended)[kLongColumns]) const {
    ITM_FAST_DYNAMIC_SHARED(float, long_sums, Memory::kSums, Tile::kWarps * kLongColumns * 2);
    const int d = dim_step * Tile::kThreads + thread_index();
    const int columns = columns_of(run);
    const S* query = first_query(run);
    for (int of_query = 0; of_query < 2; ++of_query) {
      float terms[kLongColumns];
      for (int j = 0; j < kLongColumns; ++j) {
        const bool is_inside = d < dim_ && j < columns;
        const float other = of_query == 0 ? attended[j] : is_inside ? widen(query[j * dim_ + d]) : 0.0f;
        terms[j] = is_inside ? attended[j] * other : 0.0f;
      }
      const float sum = add_columns(terms);
      const int at = (warp() * kLongColumns + lane() / 2) * 2 + of_query;
      if (lane() % 2 == 0) long_sums[at] = dim_step == 0 ? sum : long_sums[at] + sum;
    }
  }

  // Adds up the sums of the warps and writes the cosines. Ends with a barrier.
  ITM_FAST_DEVICE void finish(int run, float total) const {
    ITM_FAST_DYNAMIC_SHARED(float, long_sums, Memory::kSums, Tile::kWarps * kLongColumns * 2);
    ITM_FAST_DYNAMIC_SHARED(float, long_cosines, Memory::kCosines, kLongColumns);
    barrier();
    if (thread_index() < columns_of(run)) {
      float square = 0.0f, dot = 0.0f;
      for (int w = 0; w < Tile::kWarps; ++w) {
        square += long_sums[(w * kLongColumns + thread_index()) * 2];
        dot += long_sums[(w * kLongColumns + thread_index()) * 2 + 1];
      }
      const float norm = query_norms_[run * kLongColumns + thread_index()];
      long_cosines[thread_index()] = cosine_of(dot, square, total, norm);
    }
    barrier();
  }

  const S *queries_, *contexts_;
  const int n_queries_, n_contexts_, dim_;
  const float* query_norms_;
  const PairOptions& options_;
  const int pieces_, runs_;
  int open_piece_ = -1, open_run_ = -1, factors_of_ = -1;
};

// The first thread of the block returns the score of two sets.
template <typename Tile, typename S>
ITM_FAST_DEVICE float score_long_pair(const SetRows<S>& queries, int64_t query, const SetRows<S>& contexts,
                                      int64_t context, int64_t dim, const float* query_norms,
                                      const PairOptions& options) {
  const int n_queries = static_cast<int>(queries.length(query)),
            n_contexts = static_cast<int>(contexts.length(context));
  if (n_queries == 0 || n_contexts == 0) return 0.0f;
  const int64_t first_query = queries.offset(query), first_context = contexts.offset(context);
  LongPair<Tile, S> pair(queries.values + first_query * dim, n_queries, contexts.values + first_context * dim,
                         n_contexts, static_cast<int>(dim), query_norms + first_query, options);
  return pair.score();
}

}  // namespace itm_fast::cuda
