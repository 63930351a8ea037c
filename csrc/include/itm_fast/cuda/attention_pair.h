// The attention of one pair of sets on a GPU: from the raw scores of a query set with a context set to the cosines of
// the queries and the score of the pair (steps 2 to 7 of the design), with one thread per row or per column.
//
// This code does not know where scores and attention are stored: it accesses rows and columns through functions of an
// index. NaN, infinities and zeros give the same results as in the CPU kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "itm_fast/cross_attention.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

// Below this share of (sum_k p_k |x_k|)^2 the quadratic form p G p has lost too many digits; the attended vector of
// that query is then formed explicitly.
inline constexpr float kCancellation = 1.0f / 512.0f;

// Gram matrices are read in vectors of four: rows are padded with zeros to a multiple of this.
inline constexpr int kGramBlock = 8;

constexpr int gram_stride(int n_contexts) { return (n_contexts + kGramBlock - 1) / kGramBlock * kGramBlock; }

// CrossAttentionOptions in the compute type.
struct PairOptions {
  float temperature, negative_slope, logsumexp_temperature;
  Normalization normalization;
  Focal focal;
  Aggregation aggregation;
  bool clips;
  bool small_logits;  // skip the maximum of the logits

  PairOptions() = default;
  explicit PairOptions(const CrossAttentionOptions& o)
      : temperature(static_cast<float>(o.temperature)),
        negative_slope(static_cast<float>(o.negative_slope)),
        logsumexp_temperature(static_cast<float>(o.logsumexp_temperature)),
        normalization(o.normalization),
        focal(o.focal),
        aggregation(o.aggregation),
        clips(o.normalization == Normalization::clipped_l2norm || o.normalization == Normalization::clipped_l1norm ||
              o.normalization == Normalization::clipped),
        small_logits(o.normalization != Normalization::clipped && o.normalization != Normalization::no_norm &&
                     o.temperature <= 10.0 && o.temperature >= -10.0) {}

  // NaN counts as positive and stays NaN.
  ITM_FAST_DEVICE float clipped(float raw) const { return clips && raw <= 0.0f ? raw * negative_slope : raw; }
  ITM_FAST_DEVICE bool is_l2() const {
    return normalization == Normalization::l2norm || normalization == Normalization::clipped_l2norm;
  }
  ITM_FAST_DEVICE bool is_l1() const {
    return normalization == Normalization::l1norm || normalization == Normalization::clipped_l1norm;
  }
  ITM_FAST_DEVICE bool is_softmax() const { return normalization == Normalization::softmax; }
  ITM_FAST_DEVICE bool is_hard() const { return focal == Focal::hard; }
};

// The published defaults, known at compile time: inner loops do not branch on options.
struct DefaultPairOptions {
  float temperature, negative_slope;
  static constexpr float logsumexp_temperature = 1.0f;  // not used
  static constexpr Focal focal = Focal::none;
  static constexpr Aggregation aggregation = Aggregation::mean;
  static constexpr bool clips = true, small_logits = true;

  ITM_FAST_DEVICE explicit DefaultPairOptions(const PairOptions& options)
      : temperature(options.temperature), negative_slope(options.negative_slope) {}
  ITM_FAST_DEVICE static bool are(const PairOptions& options) {
    return options.normalization == Normalization::clipped_l2norm && options.focal == focal &&
           options.aggregation == aggregation && options.small_logits;
  }

  ITM_FAST_DEVICE float clipped(float raw) const { return raw <= 0.0f ? raw * negative_slope : raw; }
  static constexpr bool is_l2() { return true; }
  static constexpr bool is_l1() { return false; }
  static constexpr bool is_softmax() { return false; }
  static constexpr bool is_hard() { return false; }
};

// Either type of options for a gradient: the greatest numerator is exactly 1, so that opposite vectors cancel.
template <typename Options>
struct ExactOptions : Options {
  static constexpr bool small_logits = false;

  ITM_FAST_DEVICE explicit ExactOptions(const Options& options) : Options(options) {}
};

// Functions below take any of these types of options.

// Statistics of one context's row of raw scores for the normalisation over the queries. The row may arrive in parts.
struct RowStatistics {
  float total = 0.0f;  // of squares, of absolute values, or of exp(raw - peak)
  float peak = -HUGE_VALF;

  template <typename Options>
  ITM_FAST_DEVICE void add(float raw, const Options& options) {
    if (options.is_softmax()) {
      if (peak < raw) {
        total = total * expf(peak - raw) + expf(raw - raw);
        peak = raw;
      } else if (raw != -HUGE_VALF) {  // The difference of two infinities is NaN; -inf adds nothing.
        total += expf(raw - peak);
      }
      return;
    }
    const float x = options.clipped(raw);
    if (options.is_l2()) total += x * x;
    if (options.is_l1()) total += fabsf(x);
  }

  // The norm over the queries, or 1 without a normalisation.
  template <typename Options>
  ITM_FAST_DEVICE float denominator(const Options& options) const {
    const float epsilon = static_cast<float>(kNormEpsilon);
    return options.is_l2() ? sqrtf(total) + epsilon : options.is_l1() ? total + epsilon : 1.0f;
  }

  // The factor with which logit() computes logits of the row.
  template <typename Options>
  ITM_FAST_DEVICE float factor(const Options& options) const {
    return options.is_softmax() ? peak + logf(total) : options.temperature / denominator(options);
  }
};

// The factor of the row raw(0) to raw(n - 1).
template <typename Raw, typename Options>
ITM_FAST_DEVICE float row_factor(const Raw& raw, int n, const Options& options) {
  RowStatistics statistics;
  for (int j = 0; j < n; ++j) statistics.add(raw(j), options);
  return statistics.factor(options);
}

// temperature * a of one raw score.
template <typename Options>
ITM_FAST_DEVICE float logit(float raw, float factor, const Options& options) {
  return options.is_softmax() ? options.temperature * expf(raw - factor) : options.clipped(raw) * factor;
}

// The maximum logit so far. It may drop a NaN, which returns as a numerator.
ITM_FAST_DEVICE float later_peak(float peak, float logit) { return logit < peak ? peak : logit; }

// The contexts that a focal mode keeps: those with p * weight > bound, or all if none meets this. `total` is the sum of
// all numerators. `weight` and `bound` must be summed over all contexts before the first call of keeps().
struct FocalRule {
  bool drops = false;
  float total = 1.0f, weight = 0.0f, bound = 0.0f;

  ITM_FAST_DEVICE void add(float numerator, Focal focal) {
    const float p = numerator / total, root = focal == Focal::prob ? sqrtf(p) : 1.0f;
    weight += root;
    bound += p * root;
  }
  // The product is rounded before the comparison, as in the reference, so it cannot be fused with a subtraction.
  ITM_FAST_DEVICE bool keeps(float numerator) const { return !drops || (numerator / total) * weight > bound; }
};

// The first maximum of a sequence of logits. As in argmax, NaN counts as the maximum.
struct GreatestLogit {
  float value = 0.0f;
  int place = -1;

  ITM_FAST_DEVICE void add(float logit, int at) {
    if (place >= 0 && (value != value || logit <= value)) return;
    value = logit;
    place = at;
  }
};

// Sums over the contexts of one query, of the unnormalised attention e; dropped contexts are 0.
struct ColumnAttention {
  float total = 0.0f;  // sum_k e_k: e / total is the attention
  float dot = 0.0f;    // sum_k e_k s_k = <q, sum_k e_k x_k>
};

// attend_column for hard attention: all attention goes to the context with the greatest logit.
template <typename Raw, typename Factor, typename Store, typename Options>
ITM_FAST_DEVICE ColumnAttention attend_hard(const Raw& raw, const Factor& factor, const Store& store, int n,
                                            const Options& options) {
  GreatestLogit greatest;
  for (int k = 0; k < n; ++k) greatest.add(logit(raw(k), factor(k), options), k);
  ColumnAttention sums;
  sums.total = 1.0f;
  for (int k = 0; k < n; ++k) {
    const float s = raw(k), e = k == greatest.place ? 1.0f : 0.0f;
    sums.dot += e * s;  // NaN if the score of any context is not finite.
    store(k, e);
  }
  return sums;
}

// The attention of one query over n contexts, with raw scores raw(k) and row factors factor(k). Calls store(k, e_k) for
// every context, after the last use of raw(k). Raw scores of a few later contexts may have been read by then.
template <typename Raw, typename Factor, typename Store, typename Options>
ITM_FAST_DEVICE ColumnAttention attend_column(const Raw& raw, const Factor& factor, const Store& store, int n,
                                              const Options& options) {
  if (options.is_hard()) return attend_hard(raw, factor, store, n, options);
  float peak = 0.0f;
  if (!options.small_logits) {
    peak = logit(raw(0), factor(0), options);
    for (int k = 1; k < n; ++k) peak = later_peak(peak, logit(raw(k), factor(k), options));
  }
  const auto numerator = [&](float s, int k) { return expf(logit(s, factor(k), options) - peak); };

  FocalRule rule;
  if (options.focal != Focal::none) {
    rule.total = 0.0f;
    for (int k = 0; k < n; ++k) rule.total += numerator(raw(k), k);
    for (int k = 0; k < n; ++k) rule.add(numerator(raw(k), k), options.focal);
    rule.drops = true;
    bool any = false;
    for (int k = 0; k < n && !any; ++k) any = rule.keeps(numerator(raw(k), k));
    rule.drops = any;
  }
  ColumnAttention sums;
  struct Loaded {
    float score, numerator;
  };
  const auto load = [&](int k) -> Loaded {
    const float s = raw(k);
    return {s, numerator(s, k)};
  };
  load_ahead(0, n, load, [&](int k, const Loaded& loaded) {
    const float e = rule.keeps(loaded.numerator) ? loaded.numerator : 0.0f;
    sums.total += e;
    sums.dot += e * loaded.score;
    store(k, e);
  });
  return sums;
}

// The squared norm of sum_k e_k x_k, and the value it is compared with to detect lost digits.
struct AttendedNorm {
  float square = 0.0f;  // e G e
  float scale = 0.0f;   // sum_k e_k |x_k|

  ITM_FAST_DEVICE bool is_lost() const { return square < scale * scale * kCancellation; }
};

// Of kCount queries at once, which share each load of the matrix, with the attention attention(i, k) of query i. From
// the Gram matrix of the contexts: symmetric, n rows `gram_stride(n)` apart, aligned to 16 bytes. Elements right of a
// diagonal block count twice, and elements left of it are skipped.
template <int kCount, typename Attention>
ITM_FAST_DEVICE void find_attended_norms(AttendedNorm (&found)[kCount], const Attention& attention, const float* gram,
                                         int n) {
  const int stride = gram_stride(n);
  for (int first = 0; first < n; first += kGramBlock) {
    float sums[kCount][kGramBlock] = {};
    const auto add_row = [&](int l) {
      float row[kGramBlock];
      ITM_FAST_UNROLLED
      for (int part = 0; part < kGramBlock; part += 4) {
        float four[4];
        load_four(four, gram + l * stride + first + part);
        for (int i = 0; i < 4; ++i) row[part + i] = four[i];
      }
      ITM_FAST_UNROLLED
      for (int query = 0; query < kCount; ++query) {
        const float e = attention(query, l);
        for (int i = 0; i < kGramBlock; ++i) sums[query][i] += row[i] * e;
      }
    };
    for (int l = first + kGramBlock; l < n; ++l) add_row(l);
    for (int query = 0; query < kCount; ++query) {
      for (int i = 0; i < kGramBlock; ++i) sums[query][i] *= 2.0f;
    }
    for (int l = first; l < n && l < first + kGramBlock; ++l) add_row(l);
    ITM_FAST_UNROLLED
    for (int i = 0; i < kGramBlock; ++i) {
      if (first + i >= n) continue;
      const float norm = sqrtf(gram[(first + i) * stride + first + i]);
      ITM_FAST_UNROLLED
      for (int query = 0; query < kCount; ++query) {
        const float e = attention(query, first + i);
        found[query].square += e * sums[query][i];
        found[query].scale += e * norm;
      }
    }
  }
}

template <typename Attention>
ITM_FAST_DEVICE AttendedNorm attended_norm(const Attention& attention, const float* gram, int n) {
  AttendedNorm found[1];
  find_attended_norms(found, [&](int, int k) { return attention(k); }, gram, n);
  return found[0];
}

// <q, c> / max(|q| |c|, 1e-8) of the attended vector c = sum_k e_k x_k / total.
ITM_FAST_DEVICE float cosine_of(float dot, float square, float total, float query_norm) {
  const float least = static_cast<float>(kNormEpsilon);
  const float norms = query_norm * sqrtf(square) / total;
  return dot / total / (norms < least ? least : norms);
}

// The aggregate of n cosines, which may be added one by one.
class CosineAggregate {
 public:
  template <typename Options>
  ITM_FAST_DEVICE void add(float cosine, const Options& options) {
    switch (options.aggregation) {
      case Aggregation::max:  // The first NaN stays.
        if (is_empty_ || (!(value_ != value_) && !(cosine <= value_))) value_ = cosine;
        break;
      case Aggregation::logsumexp: {
        // Subtract first: large temperatures would amplify the rounding of a product.
        const float above = options.logsumexp_temperature * (cosine - peak_);
        if (is_empty_ || above > 0.0f) {
          value_ = is_empty_ ? 1.0f : value_ * expf(-above) + 1.0f;
          peak_ = cosine;
        } else {
          value_ += expf(above);
        }
        break;
      }
      default:
        value_ += cosine;
    }
    is_empty_ = false;
  }
  template <typename Options>
  ITM_FAST_DEVICE float result(int64_t n, const Options& options) const {
    if (options.aggregation == Aggregation::mean) return value_ / static_cast<float>(n);
    if (options.aggregation == Aggregation::logsumexp) return logf(value_) / options.logsumexp_temperature + peak_;
    return value_;
  }
  // The derivative of the log-sum-exp with respect to one of its cosines.
  template <typename Options>
  ITM_FAST_DEVICE float share(float cosine, const Options& options) const {
    return expf(options.logsumexp_temperature * (cosine - peak_)) / value_;
  }

 private:
  float value_ = 0.0f, peak_ = 0.0f;
  bool is_empty_ = true;
};

// Calls run(options), with the defaults known at compile time if `options` are those.
template <typename Run>
ITM_FAST_DEVICE void with_options(const PairOptions& options, const Run& run) {
  if (DefaultPairOptions::are(options)) {
    run(DefaultPairOptions(options));
  } else {
    run(options);
  }
}

}  // namespace itm_fast::cuda
