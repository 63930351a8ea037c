// Attention of one context set over a row of queries, with lanes over the queries.
//
// A block of raw scores has one row per context k and one column per query j; the columns of a query set are adjacent.
// Blocks are padded to whole vectors. A vector may be read or written past a set's end, because work from left to right
// overwrites the excess. Rows of a block are `stride` apart.
#pragma once

#include "itm_fast/cpu/simd.h"
#include "itm_fast/cross_attention.h"

namespace itm_fast::ITM_FAST_ISA {

ITM_FAST_INLINE bool is_clipped(Normalization mode) {
  return mode == Normalization::clipped_l2norm || mode == Normalization::clipped_l1norm ||
         mode == Normalization::clipped;
}

template <typename T>
ITM_FAST_INLINE Vector<T> absolute(Vector<T> x) {
  return x < Vector<T>{} ? -x : x;
}

template <typename T>
ITM_FAST_INLINE Vector<T> square_root(Vector<T> x) {
  Vector<T> result{};
  for (int lane = 0; lane < kLanes<T>; ++lane) result[lane] = std::sqrt(x[lane]);
  return result;
}

// The clipped scores of one vector; lanes past the set are zero. NaN counts as positive and stays NaN.
template <typename T>
ITM_FAST_INLINE Vector<T> clipped_scores(const T* raw, int64_t j, int64_t n, bool clip, T slope) {
  Vector<T> x = load(raw + j);
  if (clip) x = x <= Vector<T>{} ? x * slope : x;
  if (n - j < kLanes<T>) x = select<T>(first_lanes<T>(n - j), x, Vector<T>{});
  return x;
}

// The denominator for a row of one query set: the norm plus epsilon, or 1. For l2, `norm` receives the norm.
template <typename T>
ITM_FAST_INLINE T row_denominator(const T* raw, int64_t n, Normalization mode, bool clip, T slope, T& norm) {
  Vector<T> total{};
  norm = T(0);
  switch (mode) {
    case Normalization::clipped_l2norm:
    case Normalization::l2norm:
      for (int64_t j = 0; j < n; j += kLanes<T>) {
        const Vector<T> x = clipped_scores(raw, j, n, clip, slope);
        total += x * x;
      }
      norm = std::sqrt(sum_lanes<T>(total));
      return norm + T(kNormEpsilon);
    case Normalization::clipped_l1norm:
    case Normalization::l1norm:
      for (int64_t j = 0; j < n; j += kLanes<T>) total += absolute<T>(clipped_scores(raw, j, n, clip, slope));
      norm = sum_lanes<T>(total);
      return norm + T(kNormEpsilon);
    default:
      return T(1);
  }
}

// logits[j] = temperature * a[j] for the queries j < n of one set and one context (steps 2 and 3 of the design). Writes
// whole vectors.
template <typename T>
ITM_FAST_INLINE void normalize_row(const T* raw, T* logits, int64_t n, const CrossAttentionOptions& options) {
  const bool clip = is_clipped(options.normalization);
  const T slope = static_cast<T>(options.negative_slope);
  const T temperature = static_cast<T>(options.temperature);
  if (options.normalization == Normalization::softmax) {
    T peak = raw[0];
    for (int64_t j = 1; j < n; ++j) peak = peak < raw[j] ? raw[j] : peak;
    Vector<T> total{};
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      Vector<T> e = exp_vector(load(raw + j) - peak);
      if (n - j < kLanes<T>) e = select<T>(first_lanes<T>(n - j), e, Vector<T>{});
      store<T>(logits + j, e);
      total += e;
    }
    const T scale = temperature / sum_lanes<T>(total);
    for (int64_t j = 0; j < n; j += kLanes<T>) store<T>(logits + j, load(logits + j) * scale);
    return;
  }
  T norm;
  const T scale = temperature / row_denominator(raw, n, options.normalization, clip, slope, norm);
  for (int64_t j = 0; j < n; j += kLanes<T>) {
    store<T>(logits + j, clipped_scores(raw, j, n, clip, slope) * scale);
  }
}

// normalize_row for the `n_rows` contexts of one set. Computes the norms of one vector of rows at a time.
template <typename T>
ITM_FAST_INLINE void normalize_rows(const T* raw, int64_t raw_stride, T* logits, int64_t stride, int64_t n_rows,
                                    int64_t n, const CrossAttentionOptions& options) {
  const Normalization mode = options.normalization;
  const bool l2 = mode == Normalization::clipped_l2norm || mode == Normalization::l2norm;
  if (!l2 && mode != Normalization::clipped_l1norm && mode != Normalization::l1norm) {
    for (int64_t k = 0; k < n_rows; ++k) normalize_row(raw + k * raw_stride, logits + k * stride, n, options);
    return;
  }
  const bool clip = is_clipped(mode);
  const T slope = static_cast<T>(options.negative_slope);
  for (int64_t first = 0; first < n_rows; first += kLanes<T>) {
    const int64_t count = n_rows - first < kLanes<T> ? n_rows - first : kLanes<T>;
    Vector<T> terms[kLanes<T>];
    for (int64_t k = 0; k < kLanes<T>; ++k) {
      const T* row = raw + (first + k) * raw_stride;
      Vector<T> sum{};
      for (int64_t j = 0; k < count && j < n; j += kLanes<T>) {
        const Vector<T> x = clipped_scores(row, j, n, clip, slope);
        sum += l2 ? x * x : absolute<T>(x);
      }
      terms[k] = sum;
    }
    const Vector<T> totals = sum_rows<T>(terms);
    T scales[kLanes<T>];
    store<T>(scales, static_cast<T>(options.temperature) /
                         ((l2 ? square_root<T>(totals) : totals) + static_cast<T>(kNormEpsilon)));
    for (int64_t k = 0; k < count; ++k) {
      const T* row = raw + (first + k) * raw_stride;
      T* target = logits + (first + k) * stride;
      for (int64_t j = 0; j < n; j += kLanes<T>)
        store<T>(target + j, clipped_scores(row, j, n, clip, slope) * scales[k]);
    }
  }
}

// Adds the gradient of one row's raw scores to `raw_gradient[j]`, given the gradient of its logits; `logits` as
// normalize_row wrote them. The derivative of a norm at the zero row is zero.
template <typename T>
inline void normalize_row_backward(const T* raw, const T* logits, const T* logit_gradient, T* raw_gradient, int64_t n,
                                   const CrossAttentionOptions& options) {
  const Normalization mode = options.normalization;
  const bool clip = is_clipped(mode);
  const T slope = static_cast<T>(options.negative_slope);
  const T temperature = static_cast<T>(options.temperature);
  T norm;
  const T denominator = row_denominator(raw, n, mode, clip, slope, norm);
  const T scale = temperature / denominator;
  // Dividing before multiplying lets the terms of a set of one query cancel exactly. With temperature 0 nothing is
  // divided, and the gradient is zero.
  const bool softmax = mode == Normalization::softmax && temperature != T(0);
  T along = T(0);  // sum_j (gradient of a_j) * a_j, without the temperature
  for (int64_t j = 0; j < n; ++j) {
    const T clipped = clip && raw[j] <= T(0) ? raw[j] * slope : raw[j];
    along += logit_gradient[j] * (softmax ? logits[j] / temperature : clipped / denominator);
  }
  for (int64_t j = 0; j < n; ++j) {
    const T clipped = clip && raw[j] <= T(0) ? raw[j] * slope : raw[j];
    T gradient = logit_gradient[j] * scale;
    switch (mode) {
      case Normalization::softmax:
        // logits = temperature * a
        gradient = softmax ? logits[j] * (logit_gradient[j] - along) : T(0);
        break;
      case Normalization::clipped_l2norm:
      case Normalization::l2norm:
        if (norm > T(0)) gradient -= along * scale * (clipped / norm);
        break;
      case Normalization::clipped_l1norm:
      case Normalization::l1norm:
        if (clipped != T(0)) gradient -= clipped > T(0) ? along * scale : -along * scale;
        break;
      default:
        break;
    }
    raw_gradient[j] += clip && raw[j] <= T(0) ? gradient * slope : gradient;
  }
}

// Whether the logits are so small that the softmax needs no maximum: numerators of e^-10 to e^10 and their squares are
// far from the limits of float32.
ITM_FAST_INLINE bool has_small_logits(const CrossAttentionOptions& options) {
  return options.normalization != Normalization::clipped && options.normalization != Normalization::no_norm &&
         options.temperature <= 10.0 && options.temperature >= -10.0;
}

// Turns one vector of columns of logits into hard attention in place: 1 for the first maximum, 0 elsewhere. As in
// argmax, NaN counts as the maximum. Returns the sum, 1.
template <typename T>
ITM_FAST_INLINE Vector<T> attend_hard(T* columns, int64_t stride, int64_t n_contexts) {
  Vector<T> best = load(columns);
  for (int64_t k = 1; k < n_contexts; ++k) {
    const Vector<T> x = load(columns + k * stride);
    best = select<T>(~(x <= best) & (best == best), x, best);
  }
  Mask<T> found{};
  for (int64_t k = 0; k < n_contexts; ++k) {
    const Vector<T> x = load(columns + k * stride);
    const Mask<T> is_best = ((x == best) | (x != x)) & ~found;
    store<T>(columns + k * stride, select<T>(is_best, splat(T(1)), Vector<T>{}));
    found |= is_best;
  }
  return splat(T(1));
}

// Turns one vector of columns of logits into unnormalised attention in place: exp, softmax numerators over the
// contexts, zero where the focal mode drops a context. Returns the sum over the kept contexts.
template <typename T>
ITM_FAST_INLINE Vector<T> attend_columns(T* columns, int64_t stride, int64_t n_contexts, bool small_logits,
                                         Focal focal) {
  if (focal == Focal::hard) return attend_hard(columns, stride, n_contexts);
  Vector<T> peak{};
  if (!small_logits) {
    peak = load(columns);
    for (int64_t k = 1; k < n_contexts; ++k) peak = maximum<T>(load(columns + k * stride), peak);
  }
  Vector<T> total{};
  for (int64_t k = 0; k < n_contexts; ++k) {
    const Vector<T> e = exp_vector(load(columns + k * stride) - peak);
    store<T>(columns + k * stride, e);
    total += e;
  }
  if (focal == Focal::none) return total;

  // A context is kept if p * factor > bound. With p = e / total the comparison matches the reference. The product must
  // be rounded before the comparison, so it must not be fused with a subtraction.
  Vector<T> factor = splat(static_cast<T>(n_contexts)), bound{};
  if (focal == Focal::prob) {
    factor = Vector<T>{};
    for (int64_t k = 0; k < n_contexts; ++k) {
      const Vector<T> p = load(columns + k * stride) / total;
      const Vector<T> root = square_root<T>(p);
      factor += root;
      bound += p * root;
    }
  } else {
    for (int64_t k = 0; k < n_contexts; ++k) bound += load(columns + k * stride) / total;
  }
  Vector<T> kept_total{};
  Mask<T> any{};
  for (int64_t k = 0; k < n_contexts; ++k) {
    const Vector<T> e = load(columns + k * stride);
    const Mask<T> kept = (e / total) * factor > bound;
    kept_total += select<T>(kept, e, Vector<T>{});
    any |= kept;
  }
  for (int64_t k = 0; k < n_contexts; ++k) {
    const Vector<T> e = load(columns + k * stride);
    const Mask<T> kept = (e / total) * factor > bound;
    store<T>(columns + k * stride, select<T>(kept | ~any, e, Vector<T>{}));
  }
  return select<T>(any, kept_total, total);
}

// log(sum_j exp(t r_j)) is t * peak + log(total), where `peak` is the cosine with the greatest t r_j. Differences are
// computed before they are multiplied: a large t would otherwise amplify the rounding of t r_j.
template <typename T>
struct LogSumExp {
  T t, peak, total = T(0);

  LogSumExp(const T* cosine, int64_t n, double temperature) : t(static_cast<T>(temperature)), peak(cosine[0]) {
    for (int64_t j = 1; j < n; ++j) peak = t * (cosine[j] - peak) > T(0) ? cosine[j] : peak;
    for (int64_t j = 0; j < n; ++j) total += term(cosine[j]);
  }
  T term(T cosine) const { return std::exp(t * (cosine - peak)); }
};

// Aggregates the cosines of one query set (step 7 of the design).
template <typename T>
inline T aggregate(const T* cosine, int64_t n, const CrossAttentionOptions& options) {
  T result = T(0);
  switch (options.aggregation) {
    case Aggregation::max:
      result = cosine[0];
      for (int64_t j = 1; j < n; ++j) {
        if (!(result != result) && !(cosine[j] <= result)) result = cosine[j];
      }
      return result;
    case Aggregation::logsumexp: {
      const LogSumExp<T> sum(cosine, n, options.logsumexp_temperature);
      return std::log(sum.total) / sum.t + sum.peak;
    }
    default:
      for (int64_t j = 0; j < n; ++j) result += cosine[j];
      return options.aggregation == Aggregation::mean ? result / static_cast<T>(n) : result;
  }
}

// The gradient of each cosine, given the gradient of the set's score.
template <typename T>
inline void aggregate_backward(const T* cosine, int64_t n, T gradient, const CrossAttentionOptions& options,
                               T* cosine_gradient) {
  switch (options.aggregation) {
    case Aggregation::max: {
      int64_t best = 0;
      for (int64_t j = 1; j < n; ++j) {
        if (!(cosine[best] != cosine[best]) && !(cosine[j] <= cosine[best])) best = j;
      }
      for (int64_t j = 0; j < n; ++j) cosine_gradient[j] = j == best ? gradient : T(0);
      return;
    }
    case Aggregation::logsumexp: {
      const LogSumExp<T> sum(cosine, n, options.logsumexp_temperature);
      for (int64_t j = 0; j < n; ++j) cosine_gradient[j] = gradient * (sum.term(cosine[j]) / sum.total);
      return;
    }
    default: {
      const T share = options.aggregation == Aggregation::mean ? gradient / static_cast<T>(n) : gradient;
      for (int64_t j = 0; j < n; ++j) cosine_gradient[j] = share;
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
