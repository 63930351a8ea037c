// The gradient of one pair of sets on a GPU, computed by one block: from the rows of both sets and the gradient of
// their score to the factors of those rows.
#pragma once

#include "itm_fast/cuda/pair_recompute.h"

namespace itm_fast::cuda {

// The gradient of cosine(j), given the gradient of the aggregate of all n.
template <typename Cosine, typename Options>
ITM_FAST_DEVICE float cosine_gradient(const Cosine& cosine, int j, int n, float gradient, const Options& options) {
  if (options.aggregation == Aggregation::sum) return gradient;
  if (options.aggregation == Aggregation::mean) return gradient / static_cast<float>(n);
  if (options.aggregation == Aggregation::max) {  // All of it to the first of the greatest, or to the first NaN.
    int best = 0;
    for (int i = 1; i < n; ++i) {
      if (!(cosine(best) != cosine(best)) && !(cosine(i) <= cosine(best))) best = i;
    }
    return j == best ? gradient : 0.0f;
  }
  CosineAggregate aggregate;
  for (int i = 0; i < n; ++i) aggregate.add(cosine(i), options);
  return gradient * aggregate.share(cosine(j), options);
}

// The derivatives of a cosine, times its gradient `incoming`. Those with respect to |q| and |c| are divided by these
// norms, which makes them the factors of the vectors q and c themselves. A query of zeros has no gradient.
struct CosineFactors {
  float dot;     // of c in the gradient of q, and of q in that of c
  float square;  // of c in its own gradient
  float norm;    // of q in its own gradient

  // For a cosine of a query of norm `query_norm` with an attended vector of squared norm `attended_square`.
  ITM_FAST_DEVICE CosineFactors(float incoming, float cosine, float attended_square, float query_norm) {
    const float attended_norm = sqrtf(attended_square);
    const float product = query_norm * attended_norm, least = static_cast<float>(kNormEpsilon);
    const bool is_divided = !(product < least);
    const float denominator = is_divided ? product : least;
    const float shared = is_divided ? -incoming * cosine / denominator : 0.0f;
    dot = query_norm == 0.0f ? 0.0f : incoming / denominator;
    square = is_divided ? shared * query_norm / attended_norm : 0.0f;
    norm = is_divided ? shared * attended_norm / query_norm : 0.0f;
  }
};

// Through the aggregate and the cosines.
template <typename Options>
ITM_FAST_DEVICE void differentiate_cosines(const PairNumbers& numbers, int n, float gradient, const Options& options) {
  for (int j = thread_index(); j < n; j += kGradientThreads) {
    const float incoming = cosine_gradient([&](int i) { return numbers.cosine[i]; }, j, n, gradient, options);
    const CosineFactors factors(incoming, numbers.cosine[j], numbers.square[j], numbers.norm[j]);
    numbers.dot[j] = factors.dot;
    numbers.square[j] = factors.square;
    numbers.norm[j] = factors.norm;
  }
}

// Through the softmax over the contexts: `mixed` becomes the gradient of the logits; one warp per query.
ITM_FAST_DEVICE void differentiate_attention(const PairNumbers& numbers, int n_queries, int n_contexts) {
  for (int j = warp(); j < n_queries; j += kGradientWarps) {
    const int64_t at = j * numbers.stride;
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

// Through the normalisation over the n queries and the clip, for one context: calls store(j, gradient of raw score j).
// logit(j) is the gradient of a logit. The derivative of a norm at the zero row is zero.
//
// With the norm N of the clipped scores x, and u = x / N, the derivative of x / (N + e) maps the incoming gradient g,
// divided by N + e, to g - v t + (e / (N + e)) v t, with t = sum g u, and v = u for l2, the signs of x for l1. In this
// form the terms of a set of one query, with u = v = 1 or -1, cancel exactly.
template <typename Raw, typename Logit, typename Store, typename Options>
ITM_FAST_DEVICE void differentiate_row(const Raw& raw_score, const Logit& logit, const Store& store, int n,
                                       const RowNorm& row, const Options& options) {
  const bool softmax = options.is_softmax();
  const bool is_divided = (options.is_l2() || options.is_l1()) && !(row.norm == 0.0f);
  const auto unit = [&](float raw) {
    return softmax ? row.normalized(raw, options) : is_divided ? options.clipped(raw) / row.norm : 0.0f;
  };
  float along = 0.0f;
  for (int j = 0; j < n; ++j) along += logit(j) * unit(raw_score(j));
  const float scale = softmax ? options.temperature : options.temperature / row.denominator;
  const float rest = static_cast<float>(kNormEpsilon) / row.denominator;
  for (int j = 0; j < n; ++j) {
    const float raw = raw_score(j), clipped = options.clipped(raw);
    float gradient = logit(j);
    if (softmax) {
      gradient = unit(raw) * (gradient - along);
    } else if (is_divided) {
      const float sign = clipped > 0.0f ? 1.0f : clipped < 0.0f ? -1.0f : clipped;  // NaN stays NaN.
      const float direction = options.is_l2() ? unit(raw) : sign;
      gradient = gradient - direction * along + rest * direction * along;
    }
    gradient *= scale;
    if (options.clips && raw <= 0.0f) gradient *= options.negative_slope;
    store(j, gradient);
  }
}

// The raw scores become their gradients; one thread per context.
template <typename Options>
ITM_FAST_DEVICE void differentiate_rows(const PairNumbers& numbers, int n_queries, int n_contexts,
                                        const Options& options) {
  each_row(numbers, n_queries, n_contexts, options, [&](int k, const RowNorm& row) {
    const auto at = [&](int j) { return int64_t{j} * numbers.stride + k; };
    differentiate_row([&](int j) { return numbers.scores[at(j)]; }, [&](int j) { return numbers.mixed[at(j)]; },
                      [&](int j, float gradient) { numbers.scores[at(j)] = gradient; }, n_queries, row, options);
  });
}

// From the gradients of the raw scores through the attention to the factors of both sides. With the attended vectors
// c_j = sum_k p_jk x_k and W_jk = scores_jk + dot_j p_jk,
// dX_k = sum_j W_jk q_j + sum_l (sum_j p_jk square_j p_jl) x_l and dQ_j = sum_k W_jk x_k + norm_j q_j.
// An exact query adds square_j p_jk c_j to dX_k, and dot_j c_j to dQ_j, instead of the terms that contain p_jl x_l: if
// the contexts cancel, dot_j c_j is a product of a large number and a short vector. Hard attention is a constant: the
// raw scores receive no gradient through it.
template <int kParts>
ITM_FAST_DEVICE void turn_pair(const PairNumbers& numbers, int n_queries, int n_contexts, bool is_hard) {
  const auto each_element = [&](const auto& body) {
    for (int i = thread_index(); i < n_queries * n_contexts; i += kGradientThreads)
      body(i / n_contexts, i % n_contexts);
  };
  each_element([&](int j, int k) {
    const int at = j * numbers.stride + k;
    const float p = numbers.attention[at], score = is_hard ? 0.0f : numbers.scores[at];
    const float both = score + numbers.dot[j] * p;
    numbers.weights<kParts>().store(j, k, both);
    numbers.turned_weights<kParts>().store(k, j, numbers.exact[j] != 0.0f ? score : both);
    numbers.attention_parts<kParts>().store(j, k, p);
  });
  barrier();  // The squares take the place of the scores.
  each_element([&](int j, int k) {
    const float p = numbers.kept_attention<kParts>(j, k);
    numbers.squares<kParts>().store(j, k, numbers.exact[j] != 0.0f ? 0.0f : p * numbers.square[j]);
  });
}

// Stores in `numbers` the factors for both sides of the pair.
template <typename S>
ITM_FAST_DEVICE void differentiate_pair(const PairRows<S>& rows, float gradient, const PairOptions& options,
                                        float* attended, const PairNumbers& numbers) {
  attend_pair(rows, options, numbers);
  compare_with_attended(rows, attended, numbers);
  with_options(options, [&](const auto& known) {
    differentiate_cosines(numbers, rows.n_queries, gradient, known);
    barrier();
    if (known.is_hard()) return;
    differentiate_attention(numbers, rows.n_queries, rows.n_contexts);
    barrier();
    differentiate_rows(numbers, rows.n_queries, rows.n_contexts, known);
    barrier();
  });
  turn_pair<RowParts<S>::kOfCoefficients>(numbers, rows.n_queries, rows.n_contexts, options.is_hard());
}

}  // namespace itm_fast::cuda
