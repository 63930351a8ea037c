// The gradient of one pair of sets on a GPU, computed by one block: from the rows of both sets and the gradient of
// their score to the factors of those rows.
//
// Everything is recomputed in float32. The attended vectors are formed, kAttendedQueries of them at a time, so that
// their norms keep all digits. With K contexts, n queries and width d, the raw scores, the attended vectors, and their
// products with the contexts take K n d multiply-adds each.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/score_tile.h"

namespace itm_fast::cuda {

inline constexpr int kGradientWarps = 8, kGradientThreads = 32 * kGradientWarps;
inline constexpr int kAttendedQueries = 8;

// The numbers of one pair in global memory: matrices (queries, contexts) and vectors with one number per query.
struct PairNumbers {
  float* scores;     // raw; at the end their gradients through the attention
  float* attention;  // p
  float* mixed;      // <x_k, c_j> of the attended vectors c; then the gradients of the logits
  float* dot;        // <q, c>; at the end the factor of c in the gradient of q, and of q in that of c
  float* square;     // |c|^2; at the end the factor of c in its own gradient
  float* norm;       // |q|; at the end the factor of q in its own gradient
  float* cosine;

  ITM_FAST_DEVICE PairNumbers(float* first, int64_t n_queries, int64_t n_contexts)
      : scores(first),
        attention(scores + n_queries * n_contexts),
        mixed(attention + n_queries * n_contexts),
        dot(mixed + n_queries * n_contexts),
        square(dot + n_queries),
        norm(square + n_queries),
        cosine(norm + n_queries) {}
};

template <typename S>
struct PairRows {
  const S *queries, *contexts;
  int n_queries, n_contexts;
  int64_t dim;
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

// products[i * n_right + k] = <left_i, right_k>: a warp computes 4 x 4 of them, with lanes over the width.
template <typename L, typename R>
ITM_FAST_DEVICE void dot_products(const L* left, int n_left, const R* right, int n_right, int64_t dim,
                                  float* products) {
  constexpr int kSide = 4;
  const int tiles_right = (n_right + kSide - 1) / kSide;
  const int tiles = (n_left + kSide - 1) / kSide * tiles_right;
  for (int tile = warp(); tile < tiles; tile += kGradientWarps) {
    const int first_left = tile / tiles_right * kSide, first_right = tile % tiles_right * kSide;
    const L* left_rows[kSide];
    const R* right_rows[kSide];
    for (int i = 0; i < kSide; ++i) {  // Past the end, repeat the last row.
      left_rows[i] = left + smaller(first_left + i, n_left - 1) * dim;
      right_rows[i] = right + smaller(first_right + i, n_right - 1) * dim;
    }
    float sums[kSide * kSide] = {};
    for (int64_t c = lane(); c < dim; c += 32) {
      float l[kSide], r[kSide];
      for (int i = 0; i < kSide; ++i) l[i] = widen(left_rows[i][c]);
      for (int i = 0; i < kSide; ++i) r[i] = widen(right_rows[i][c]);
      for (int i = 0; i < kSide * kSide; ++i) sums[i] += l[i / kSide] * r[i % kSide];
    }
    const float sum = sum_over_lanes(sums);
    const int i = first_left + lane() / 2 / kSide, k = first_right + lane() / 2 % kSide;
    if (lane() % 2 == 0 && i < n_left && k < n_right) products[static_cast<int64_t>(i) * n_right + k] = sum;
  }
}

// Shared by all queries of a set for one context: the statistics of its row of raw scores.
struct RowNorm {
  float norm, denominator, peak;

  ITM_FAST_DEVICE RowNorm(const RowStatistics& statistics, const PairOptions& options)
      : norm(options.is_l2() ? sqrtf(statistics.total) : statistics.total),
        denominator(options.is_softmax() ? statistics.total : statistics.denominator(options)),
        peak(statistics.peak) {}

  // The normalised score a; exact if the softmax has one query.
  ITM_FAST_DEVICE float normalized(float raw, const PairOptions& options) const {
    return (options.is_softmax() ? expf(raw - peak) : options.clipped(raw)) / denominator;
  }
};

// Calls body(position of j, norm) for a context's scores, one thread per context.
template <typename Body>
ITM_FAST_DEVICE void each_row(const PairNumbers& numbers, int n_queries, int n_contexts, const PairOptions& options,
                              const Body& body) {
  for (int k = thread_index(); k < n_contexts; k += kGradientThreads) {
    RowStatistics statistics;
    for (int j = 0; j < n_queries; ++j) {
      statistics.add(numbers.scores[static_cast<int64_t>(j) * n_contexts + k], options);
    }
    body(k, RowNorm(statistics, options));
  }
}

// Raw scores and attention: one thread per row, then per column.
template <typename S>
ITM_FAST_DEVICE void attend_pair(const PairRows<S>& rows, const PairOptions& options, const PairNumbers& numbers) {
  const int n = rows.n_queries, n_contexts = rows.n_contexts;
  dot_products(rows.queries, n, rows.contexts, n_contexts, rows.dim, numbers.scores);
  barrier();
  float* logits = numbers.mixed;
  each_row(numbers, n, n_contexts, options, [&](int k, const RowNorm& norm) {
    for (int j = 0; j < n; ++j) {
      const int64_t at = static_cast<int64_t>(j) * n_contexts + k;
      logits[at] = options.temperature * norm.normalized(numbers.scores[at], options);
    }
  });
  barrier();
  PairOptions of_logits = options;  // They are ready for the attention.
  of_logits.normalization = Normalization::no_norm;
  of_logits.clips = false;
  of_logits.small_logits = false;  // The greatest numerator must be exactly 1, so that opposite vectors cancel.
  for (int j = thread_index(); j < n; j += kGradientThreads) {
    const int64_t at = static_cast<int64_t>(j) * n_contexts;
    float* attention = numbers.attention + at;
    const auto store = [&](int k, float e) { attention[k] = e; };
    const float total =
        attend_column([&](int k) { return logits[at + k]; }, [](int) { return 1.0f; }, store, n_contexts, of_logits)
            .total;
    for (int k = 0; k < n_contexts; ++k) attention[k] /= total;
  }
  barrier();
}

// The cosines, and `mixed`. `attended` has room for kAttendedQueries vectors.
template <typename S>
ITM_FAST_DEVICE void compare_with_attended(const PairRows<S>& rows, float* attended, const PairNumbers& numbers) {
  const int n_contexts = rows.n_contexts;
  for (int first = 0; first < rows.n_queries; first += kAttendedQueries) {
    const int count = static_cast<int>(smaller(kAttendedQueries, rows.n_queries - first));
    const float* attention = numbers.attention + static_cast<int64_t>(first) * n_contexts;
    for (int64_t c = thread_index(); c < rows.dim; c += kGradientThreads) {
      float sums[kAttendedQueries] = {};
      for (int k = 0; k < n_contexts; ++k) {
        const float x = widen(rows.contexts[k * rows.dim + c]);
        for (int j = 0; j < kAttendedQueries; ++j) {
          sums[j] += attention[smaller(j, count - 1) * n_contexts + k] * x;
        }
      }
      for (int j = 0; j < kAttendedQueries; ++j) {
        if (j < count) attended[j * rows.dim + c] = sums[j];
      }
    }
    barrier();
    dot_products(attended, count, rows.contexts, n_contexts, rows.dim,
                 numbers.mixed + static_cast<int64_t>(first) * n_contexts);
    for (int j = warp(); j < count; j += kGradientWarps) {
      const S* query = rows.queries + (first + j) * rows.dim;
      float sums[4] = {};
      for (int64_t c = lane(); c < rows.dim; c += 32) {
        const float a = attended[j * rows.dim + c], q = widen(query[c]);
        sums[0] += a * q;
        sums[1] += a * a;
        sums[2] += q * q;
      }
      const float sum = sum_over_lanes(sums);
      const float dot = shuffle(sum, 0), square = shuffle(sum, 8), norm = sqrtf(shuffle(sum, 16));
      if (lane() == 0) {
        numbers.dot[first + j] = dot;
        numbers.square[first + j] = square;
        numbers.norm[first + j] = norm;
        numbers.cosine[first + j] = cosine_of(dot, square, 1.0f, norm);
      }
    }
    barrier();
  }
}

// The gradient of cosine j, given the gradient of the aggregate of all n.
ITM_FAST_DEVICE float cosine_gradient(const float* cosine, int j, int n, float gradient, const PairOptions& options) {
  if (options.aggregation == Aggregation::sum) return gradient;
  if (options.aggregation == Aggregation::mean) return gradient / static_cast<float>(n);
  if (options.aggregation == Aggregation::max) {  // All of it to the first of the greatest, or to the first NaN.
    int best = 0;
    for (int i = 1; i < n; ++i) {
      if (!(cosine[best] != cosine[best]) && !(cosine[i] <= cosine[best])) best = i;
    }
    return j == best ? gradient : 0.0f;
  }
  CosineAggregate aggregate;
  for (int i = 0; i < n; ++i) aggregate.add(cosine[i], options);
  return gradient * aggregate.share(cosine[j], options);
}

// Through the aggregate and the cosines. The derivatives with respect to |q| and |c| are divided by those norms, which
// makes them the factors of the vectors q and c themselves. A query of zeros has no gradient.
ITM_FAST_DEVICE void differentiate_cosines(const PairNumbers& numbers, int n, float gradient,
                                           const PairOptions& options) {
  for (int j = thread_index(); j < n; j += kGradientThreads) {
    const float incoming = cosine_gradient(numbers.cosine, j, n, gradient, options);
    const float attended_norm = sqrtf(numbers.square[j]), query_norm = numbers.norm[j];
    const float product = query_norm * attended_norm, least = static_cast<float>(kNormEpsilon);
    const bool is_divided = !(product < least);
    const float denominator = is_divided ? product : least;
    const float shared = is_divided ? -incoming * numbers.cosine[j] / denominator : 0.0f;
    numbers.dot[j] = query_norm == 0.0f ? 0.0f : incoming / denominator;
    numbers.square[j] = is_divided ? shared * query_norm / attended_norm : 0.0f;
    numbers.norm[j] = is_divided ? shared * attended_norm / query_norm : 0.0f;
  }
}

// Through the softmax over the contexts: `mixed` becomes the gradient of the logits; one warp per query.
ITM_FAST_DEVICE void differentiate_attention(const PairNumbers& numbers, int n_queries, int n_contexts) {
  for (int j = warp(); j < n_queries; j += kGradientWarps) {
    const int64_t at = static_cast<int64_t>(j) * n_contexts;
    const float dot = numbers.dot[j], factor = numbers.square[j];
    float along[1] = {};
    for (int k = lane(); k < n_contexts; k += 32) {
      const float gradient = dot * numbers.scores[at + k] + factor * numbers.mixed[at + k];
      numbers.mixed[at + k] = gradient;
      along[0] += numbers.attention[at + k] * gradient;
    }
    const float sum = sum_over_lanes(along);
    for (int k = lane(); k < n_contexts; k += 32) {
      numbers.mixed[at + k] = numbers.attention[at + k] * (numbers.mixed[at + k] - sum);
    }
  }
}

// Through the normalisation over the queries and the clip: the raw scores become their gradients; one thread per
// context. The derivative of a norm at the zero row is zero.
//
// With the norm N of the clipped scores x, and u = x / N, the derivative of x / (N + e) maps the incoming gradient g,
// divided by N + e, to g - v t + (e / (N + e)) v t, with t = sum g u, and v = u for l2, the signs of x for l1. In this
// form the terms of a set of one query, with u = v = 1 or -1, cancel exactly.
ITM_FAST_DEVICE void differentiate_rows(const PairNumbers& numbers, int n_queries, int n_contexts,
                                        const PairOptions& options) {
  each_row(numbers, n_queries, n_contexts, options, [&](int k, const RowNorm& row) {
    const bool softmax = options.is_softmax();
    const bool is_divided = (options.is_l2() || options.is_l1()) && !(row.norm == 0.0f);
    const auto unit = [&](float raw) {
      return softmax ? row.normalized(raw, options) : is_divided ? options.clipped(raw) / row.norm : 0.0f;
    };
    float along = 0.0f;
    for (int j = 0; j < n_queries; ++j) {
      const int64_t at = static_cast<int64_t>(j) * n_contexts + k;
      along += numbers.mixed[at] * unit(numbers.scores[at]);
    }
    const float scale = softmax ? options.temperature : options.temperature / row.denominator;
    const float rest = static_cast<float>(kNormEpsilon) / row.denominator;
    for (int j = 0; j < n_queries; ++j) {
      const int64_t at = static_cast<int64_t>(j) * n_contexts + k;
      const float raw = numbers.scores[at], clipped = options.clipped(raw);
      float gradient = numbers.mixed[at];
      if (softmax) {
        gradient = unit(raw) * (gradient - along);
      } else if (is_divided) {
        const float sign = clipped > 0.0f ? 1.0f : clipped < 0.0f ? -1.0f : clipped;  // NaN stays NaN.
        const float direction = options.is_l2() ? unit(raw) : sign;
        gradient = gradient - direction * along + rest * direction * along;
      }
      gradient *= scale;
      if (options.clips && raw <= 0.0f) gradient *= options.negative_slope;
      numbers.scores[at] = gradient;
    }
  });
}

// Hard attention is a constant: the raw scores receive no gradient through it.
ITM_FAST_DEVICE void clear_scores(const PairNumbers& numbers, int n_queries, int n_contexts) {
  const int64_t count = static_cast<int64_t>(n_queries) * n_contexts;
  for (int64_t i = thread_index(); i < count; i += kGradientThreads) numbers.scores[i] = 0.0f;
}

// Stores in `numbers` the factors for both sides of the pair. With the attended vectors c_j = sum_k p_jk x_k:
// dX_k = sum_j (scores_jk q_j + p_jk (dot_j q_j + square_j c_j)) and
// dQ_j = sum_k scores_jk x_k + dot_j c_j + norm_j q_j.
// The part through the attention stays separate from the rest: if the contexts cancel, dot_j c_j is a product of a
// large number and a short vector.
template <typename S>
ITM_FAST_DEVICE void differentiate_pair(const PairRows<S>& rows, float gradient, const PairOptions& options,
                                        float* attended, const PairNumbers& numbers) {
  attend_pair(rows, options, numbers);
  compare_with_attended(rows, attended, numbers);
  differentiate_cosines(numbers, rows.n_queries, gradient, options);
  barrier();
  if (options.is_hard()) {
    clear_scores(numbers, rows.n_queries, rows.n_contexts);
  } else {
    differentiate_attention(numbers, rows.n_queries, rows.n_contexts);
    barrier();
    differentiate_rows(numbers, rows.n_queries, rows.n_contexts, options);
  }
  barrier();
}

}  // namespace itm_fast::cuda
