// A pair of sets computed again for its gradient, by one block: from the rows of both sets to their raw scores, the
// attention and the cosines.
//
// Raw scores are products of rows on tensor cores. With the Gram matrix G of the contexts and the attention p, the
// attended vector c of a query has <x_k, c> = (p G)_k and |c|^2 = p G p. If the contexts cancel, these forms lose their
// digits. The attended vectors of such queries, and of sets too long for a Gram matrix, are formed: they are "exact".
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/part_sums.h"
#include "itm_fast/cuda/set_products.h"

namespace itm_fast::cuda {

inline constexpr int kGradientWarps = 8, kGradientThreads = 32 * kGradientWarps;
// Attended vectors that a block forms at a time, if it must.
inline constexpr int kAttendedQueries = 4;

// Attention times the Gram matrix keeps the digits of float32, also with rows of 16 bits.
inline constexpr int kMatrixParts = 3;

// The numbers of one pair in global memory: matrices (queries, contexts) or, if turned, (contexts, queries), and
// vectors with one number per query.
//
//   scores     | attention |  mixed          | turned attention      |
//   -- turn_pair ---------------------------------------------------------------------
//   squares                |  weights        | attention in parts    | turned weights
struct PairNumbers {
  float* scores;     // raw; then their gradients
  float* attention;  // p
  float* mixed;      // <x_k, c_j>; then the gradients of the logits
  float* dot;        // <q, c>; at the end the factor of c in the gradient of q, and of q in that of c
  float* square;     // |c|^2; at the end the factor of c in its own gradient
  float* norm;       // |q|; at the end the factor of q in its own gradient
  float* cosine;
  float* exact;               // 1 if the attended vector is formed, else 0
  float* has_exact;           // one number: 1 if one of them is
  int stride, turned_stride;  // of the matrices
  int64_t size;               // of a matrix

  ITM_FAST_DEVICE PairNumbers(float* first, int64_t n_queries, int64_t n_contexts)
      : scores(first),
        stride(static_cast<int>(padded_parts(n_contexts))),
        turned_stride(static_cast<int>(padded_parts(n_queries))),
        size(int64_t{stride} * turned_stride) {
    attention = scores + size;
    mixed = attention + size;
    dot = first + size / 2 * 13;
    square = dot + turned_stride;
    norm = square + turned_stride;
    cosine = norm + turned_stride;
    exact = cosine + turned_stride;
    has_exact = exact + turned_stride;
  }

  // Turned: p, for its product with the Gram matrix.
  ITM_FAST_DEVICE PartMatrix<kMatrixParts> turned_attention() const { return {halves(7), turned_stride}; }
  // What turn_pair leaves: p, its products with `square` (0 if exact), and the factors W of the rows in each other's
  // gradients: those of the contexts, and turned those of the queries. Two parts do not reach into `attention`.
  template <int kParts>
  ITM_FAST_DEVICE PartMatrix<kParts> attention_parts() const {
    return {halves(7), stride};
  }
  template <int kParts>
  ITM_FAST_DEVICE float kept_attention(int j, int k) const {
    return kParts == 3 ? attention_parts<kParts>().load(j, k) : attention[j * stride + k];
  }
  template <int kParts>
  ITM_FAST_DEVICE PartMatrix<kParts> squares() const {
    return {halves(0), stride};
  }
  template <int kParts>
  ITM_FAST_DEVICE PartMatrix<kParts> weights() const {
    return {halves(4), stride};
  }
  template <int kParts>
  ITM_FAST_DEVICE PartMatrix<kParts> turned_weights() const {
    return {halves(10), turned_stride};
  }

 private:
  // The address half of `count` matrices further.
  ITM_FAST_DEVICE uint16_t* halves(int count) const { return reinterpret_cast<uint16_t*>(scores) + count * size; }
};

template <typename S>
struct PairRows {
  const S *queries, *contexts;
  PartMatrix<kMatrixParts> gram;  // null if the set is too long
  int n_queries, n_contexts;
  int64_t dim;
  bool is_aligned;
};

// Adds each of kCount values (a power of two up to 32) over the lanes. A lane gets the sum of value
// lane() / (32 / kCount). Each step adds the values of two halves of the lanes, and leaves each half half of the sums.
template <int kCount>
ITM_FAST_DEVICE float sum_over_lanes(float (&values)[kCount]) {
  int distance = 16;
  for (int count = kCount / 2; count > 0; count /= 2, distance /= 2) {
    const bool upper = (lane() & distance) != 0;
    for (int i = 0; i < count; ++i) {
      const float kept = upper ? values[i + count] : values[i], given = upper ? values[i] : values[i + count];
      values[i] = kept + shuffle_xor(given, distance);
    }
  }
  for (; distance > 0; distance /= 2) values[0] += shuffle_xor(values[0], distance);
  return values[0];
}

// products[i * stride + k] = <left_i, right_k>: a warp computes 4 x 4 of them, with lanes over the width.
template <typename R>
ITM_FAST_DEVICE void dot_products(const float* left, int n_left, const R* right, int n_right, int64_t dim,
                                  float* products, int64_t stride) {
  constexpr int kSide = 4;
  const int tiles_right = (n_right + kSide - 1) / kSide;
  const int tiles = (n_left + kSide - 1) / kSide * tiles_right;
  for (int tile = warp(); tile < tiles; tile += kGradientWarps) {
    const int first_left = tile / tiles_right * kSide, first_right = tile % tiles_right * kSide;
    const float* left_rows[kSide];
    const R* right_rows[kSide];
    for (int i = 0; i < kSide; ++i) {  // Past the end, repeat the last row.
      left_rows[i] = left + smaller(first_left + i, n_left - 1) * dim;
      right_rows[i] = right + smaller(first_right + i, n_right - 1) * dim;
    }
    float sums[kSide * kSide] = {};
    for (int64_t c = lane(); c < dim; c += 32) {
      float l[kSide], r[kSide];
      for (int i = 0; i < kSide; ++i) l[i] = left_rows[i][c];
      for (int i = 0; i < kSide; ++i) r[i] = widen(right_rows[i][c]);
      for (int i = 0; i < kSide * kSide; ++i) sums[i] += l[i / kSide] * r[i % kSide];
    }
    const float sum = sum_over_lanes(sums);
    const int i = first_left + lane() / 2 / kSide, k = first_right + lane() / 2 % kSide;
    if (lane() % 2 == 0 && i < n_left && k < n_right) products[i * stride + k] = sum;
  }
}

// Shared by all queries of a set for one context: the statistics of its row of raw scores.
struct RowNorm {
  float norm, denominator, peak;

  template <typename Options>
  ITM_FAST_DEVICE RowNorm(const RowStatistics& statistics, const Options& options)
      : norm(options.is_l2() ? sqrtf(statistics.total) : statistics.total),
        denominator(options.is_softmax() ? statistics.total : statistics.denominator(options)),
        peak(statistics.peak) {}

  // The normalised score a; exact if the softmax has one query.
  template <typename Options>
  ITM_FAST_DEVICE float normalized(float raw, const Options& options) const {
    return (options.is_softmax() ? expf(raw - peak) : options.clipped(raw)) / denominator;
  }
};

// Calls body(position of j, norm) for a context's scores, one thread per context.
template <typename Options, typename Body>
ITM_FAST_DEVICE void each_row(const PairNumbers& numbers, int n_queries, int n_contexts, const Options& options,
                              const Body& body) {
  for (int k = thread_index(); k < n_contexts; k += kGradientThreads) {
    RowStatistics statistics;
    for (int j = 0; j < n_queries; ++j) statistics.add(numbers.scores[j * numbers.stride + k], options);
    body(k, RowNorm(statistics, options));
  }
}

// Options for logits in place of raw scores. They hide only `clipped` and `is_softmax`, which attend_column() calls
// through logit(). RowStatistics and differentiate_row() must not take them: they read is_l2(), is_l1() and `clips`,
// which are still those of the raw scores.
template <typename Options>
struct LogitOptions : ExactOptions<Options> {
  using ExactOptions<Options>::ExactOptions;

  ITM_FAST_DEVICE static float clipped(float logit) { return logit; }
  static constexpr bool is_softmax() { return false; }
};

// From the raw scores to the attention: one thread per row, then per column.
template <typename Options>
ITM_FAST_DEVICE void weigh_pair(const PairNumbers& numbers, int n, int n_contexts, const Options& options) {
  float* logits = numbers.mixed;
  each_row(numbers, n, n_contexts, options, [&](int k, const RowNorm& norm) {
    for (int j = 0; j < n; ++j) {
      const int64_t at = j * numbers.stride + k;
      logits[at] = options.temperature * norm.normalized(numbers.scores[at], options);
    }
  });
  barrier();
  const LogitOptions<Options> of_logits(options);
  for (int j = thread_index(); j < n; j += kGradientThreads) {
    const int64_t at = j * numbers.stride;
    float* attention = numbers.attention + at;
    const auto store = [&](int k, float e) { attention[k] = e; };
    const float total =
        attend_column([&](int k) { return logits[at + k]; }, [](int) { return 1.0f; }, store, n_contexts, of_logits)
            .total;
    for (int k = 0; k < n_contexts; ++k) {
      attention[k] /= total;
      numbers.turned_attention().store(k, j, attention[k]);
    }
  }
  barrier();
}

// Raw scores and attention.
template <typename S>
ITM_FAST_DEVICE void attend_pair(const PairRows<S>& rows, const PairOptions& options, const PairNumbers& numbers) {
  const int n = rows.n_queries, n_contexts = rows.n_contexts;
  each_product(rows.contexts, n_contexts, rows.queries, n, rows.dim, rows.is_aligned,
               [&](int k, int j, float product) { numbers.scores[j * numbers.stride + k] = product; });
  with_options(options, [&](const auto& known) { weigh_pair(numbers, n, n_contexts, known); });
}

// `mixed`, <q, c> and |c|^2 from the Gram matrix. Marks the queries whose sums lost too many digits as exact.
template <typename S>
ITM_FAST_DEVICE void compare_by_gram(const PairRows<S>& rows, const PairNumbers& numbers) {
  const int n = rows.n_queries, n_contexts = rows.n_contexts;
  using Row = SplitElement<kMatrixParts>;
  const PartTerm<Row> term{numbers.turned_attention().first, reinterpret_cast<const Row*>(rows.gram.first), n_contexts};
  each_range<Row>(n, n_contexts, [&](int first_row, int n_rows, int column) {
    const PartRange range{first_row, n_rows, column, n_contexts, rows.gram.stride, numbers.turned_stride};
    sum_parts<true, PartTile<Row>>(range, 0, 1, [&](int32_t) { return term; });
    each_part_sum<Row>(
        range, [&](int j, int k, float sum) { numbers.mixed[(first_row + j) * numbers.stride + column + k] = sum; });
    barrier();  // The sums have been read.
  });
  for (int j = warp(); j < n; j += kGradientWarps) {
    const int64_t at = j * numbers.stride;
    float sums[4] = {};
    for (int k = lane(); k < n_contexts; k += 32) {
      const float p = numbers.attention[at + k];
      sums[0] += p * numbers.scores[at + k];
      sums[1] += p * numbers.mixed[at + k];
      sums[2] += p * sqrtf(rows.gram.load(k, k));
    }
    const float sum = sum_over_lanes(sums);
    const AttendedNorm norm{shuffle(sum, 8), shuffle(sum, 16)};
    if (lane() == 0) {
      numbers.dot[j] = sum;
      numbers.square[j] = norm.square;
      numbers.exact[j] = norm.is_lost() ? 1.0f : 0.0f;
    }
  }
}

// The same for attended vectors that are formed, kAttendedQueries of them at a time. `attended` has room for them.
template <typename S>
ITM_FAST_DEVICE void compare_exactly(const PairRows<S>& rows, float* attended, const PairNumbers& numbers) {
  const int n_contexts = rows.n_contexts;
  for (int first = 0; first < rows.n_queries; first += kAttendedQueries) {
    const int count = static_cast<int>(smaller(kAttendedQueries, rows.n_queries - first));
    bool is_any = false;
    for (int j = 0; j < count; ++j) is_any = is_any || numbers.exact[first + j] != 0.0f;
    if (!is_any) continue;
    barrier();  // All threads have read the marks.
    const float* attention = numbers.attention + first * numbers.stride;
    for (int64_t c = thread_index(); c < rows.dim; c += kGradientThreads) {
      float sums[kAttendedQueries] = {};
      for (int k = 0; k < n_contexts; ++k) {
        const float x = widen(rows.contexts[k * rows.dim + c]);
        for (int j = 0; j < kAttendedQueries; ++j) sums[j] += attention[smaller(j, count - 1) * numbers.stride + k] * x;
      }
      for (int j = 0; j < kAttendedQueries; ++j) {
        if (j < count) attended[j * rows.dim + c] = sums[j];
      }
    }
    barrier();
    dot_products(attended, count, rows.contexts, n_contexts, rows.dim, numbers.mixed + first * numbers.stride,
                 numbers.stride);
    for (int j = warp(); j < count; j += kGradientWarps) {
      const S* query = rows.queries + (first + j) * rows.dim;
      float sums[2] = {};
      for (int64_t c = lane(); c < rows.dim; c += 32) {
        const float a = attended[j * rows.dim + c];
        sums[0] += a * widen(query[c]);
        sums[1] += a * a;
      }
      const float sum = sum_over_lanes(sums), square = shuffle(sum, 16);
      if (lane() == 0) {
        numbers.dot[first + j] = sum;
        numbers.square[first + j] = square;
        numbers.exact[first + j] = 1.0f;
      }
    }
    barrier();
  }
}

// The cosines, `mixed`, and which queries are exact.
template <typename S>
ITM_FAST_DEVICE void compare_with_attended(const PairRows<S>& rows, float* attended, const PairNumbers& numbers) {
  if (rows.gram.first != nullptr) {
    compare_by_gram(rows, numbers);
  } else {
    for (int j = thread_index(); j < rows.n_queries; j += kGradientThreads) numbers.exact[j] = 1.0f;
  }
  if (thread_index() == 0) *numbers.has_exact = 0.0f;
  barrier();
  compare_exactly(rows, attended, numbers);
  for (int j = warp(); j < rows.n_queries; j += kGradientWarps) {
    const float norm = norm_of_row(rows.queries + j * rows.dim, rows.dim);
    if (lane() != 0) continue;
    numbers.norm[j] = norm;
    numbers.cosine[j] = cosine_of(numbers.dot[j], numbers.square[j], 1.0f, norm);
    if (numbers.exact[j] != 0.0f) *numbers.has_exact = 1.0f;
  }
  barrier();
}

}  // namespace itm_fast::cuda
