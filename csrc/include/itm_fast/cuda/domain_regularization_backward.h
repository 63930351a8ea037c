// The backward of domain_regularization on a GPU: one launch for the discriminators, and one for the features.
//
// Every block owns the memory it writes: some columns of a discriminator's gradient, or some rows of one pair. It
// searches the negatives of all pairs for its pair, in order and including repetitions.
#pragma once

#include "itm_fast/cuda/domain_regularization.h"

namespace itm_fast::cuda {

template <typename S>
struct DomainBackward {
  DomainProblem<S> problem;
  const float* risks;                // (kinds, pairs)
  const float* sums;                 // (kinds, pairs, dim + 1)
  const float* grad_adversarial;     // (pairs,)
  const float* grad_regularization;  // (pairs,)
  float* grad_regions;               // (rows, dim); null if not requested
  float* grad_words;
  float* grad_weights;  // (pairs, dim)
  float* grad_biases;   // (pairs,)

  // The gradient with respect to the own risk, through the hinge of a kind of risk; the risk of that kind has the
  // negative of it. If a pair is its own negative, both risks are equal and would cancel up to rounding.
  ITM_FAST_DEVICE float through_hinge(int kind, int64_t pair) const {
    const int64_t other = problem.other(kind, pair);
    if (other < 0 || other == pair) return 0.0f;
    const float of_features = risks[has_foreign_features(kind) ? other : pair];
    const bool active = hinge(problem.margin, of_features, risks[kind * problem.pairs + pair]) != 0.0f;
    return active ? grad_regularization[pair] : 0.0f;
  }
};

// Blocks per pair; they share its rows in turn.
inline constexpr int kDomainShares = 4;

// Pairs whose negatives a block examines together: each thread examines one of a pair's two negatives.
inline constexpr int kDomainWindow = kDomainThreads / 2;

ITM_FAST_DEVICE int lowest_bit(uint32_t bits) { return count_trailing_ones(~bits); }

// Calls body(kind, p, own, crossed) for each pair p that has `pair` as a negative, kDomainWindow pairs at a time,
// captions before images. The risk of that kind and p has the features of `pair` if kOfFeatures, else its
// discriminator. `crossed` is the gradient with respect to that risk, and `own` the gradient with respect to the own
// risk of `pair`.
template <bool kOfFeatures, typename S, typename Body>
ITM_FAST_DEVICE void for_negatives_of(const DomainBackward<S>& p, int64_t pair, const Body& body) {
  ITM_FAST_SHARED(float, owns, kDomainThreads);
  ITM_FAST_SHARED(float, crosseds, kDomainThreads);
  ITM_FAST_SHARED(uint32_t, found, kDomainWarps);
  const DomainProblem<S>& problem = p.problem;
  if (problem.kinds == 1) return;
  for (int64_t first = 0; first < problem.pairs; first += kDomainWindow) {
    const bool of_caption = thread_index() < kDomainWindow;
    const int64_t at = first + thread_index() % kDomainWindow;
    const int of = of_caption ? kOfCaption : kOfImage, by = of_caption ? kByCaption : kByImage;
    float own = 0.0f, crossed = 0.0f;
    if (at < problem.pairs && problem.other(of, at) == pair) {
      own = p.through_hinge(of, at);
      crossed = kOfFeatures ? -own : -p.through_hinge(by, at);
    }
    owns[thread_index()] = own;
    crosseds[thread_index()] = crossed;
    const uint32_t bits = ballot(own != 0.0f || crossed != 0.0f);
    if (lane() == 0) found[warp()] = bits;
    barrier();
    for (int w = 0; w < kDomainWarps; ++w) {
      for (uint32_t left = found[w]; left != 0; left &= left - 1) {
        const int thread = w * 32 + lowest_bit(left);
        const bool is_caption = thread < kDomainWindow;
        const int kind = kOfFeatures ? (is_caption ? kOfCaption : kOfImage) : (is_caption ? kByCaption : kByImage);
        body(kind, first + thread % kDomainWindow, static_cast<float>(owns[thread]),
             static_cast<float>(crosseds[thread]));
      }
    }
    barrier();  // All have read before the next pairs are looked at.
  }
}

// The gradient with respect to the own risk of a pair, through its own hinges.
template <typename S>
ITM_FAST_DEVICE float own_gradient(const DomainBackward<S>& p, int64_t pair) {
  float own = p.grad_adversarial[pair];
  if (p.problem.kinds > 1) own += p.through_hinge(kByCaption, pair) + p.through_hinge(kByImage, pair);
  return own;
}

// Grid: for each discriminator one block per kDomainThreads columns of its weights and bias.
template <typename S>
ITM_FAST_DEVICE void discriminator_gradients(const DomainBackward<S>& p) {
  const DomainProblem<S>& problem = p.problem;
  const int64_t width = problem.dim + 1, blocks = (width + kDomainThreads - 1) / kDomainThreads;
  const int64_t pair = block_index() / blocks, column = block_index() % blocks * kDomainThreads + thread_index();
  const bool is_column = column < width;
  float own = own_gradient(p, pair), gradient = 0.0f;
  const auto add = [&](int kind, int64_t of, float factor) {
    if (is_column && factor != 0.0f) gradient += factor * p.sums[(kind * problem.pairs + of) * width + column];
  };
  if (problem.kinds > 1) {
    add(kOfCaption, pair, -p.through_hinge(kOfCaption, pair));
    add(kOfImage, pair, -p.through_hinge(kOfImage, pair));
  }
  for_negatives_of<false>(p, pair, [&](int kind, int64_t of, float of_own, float crossed) {
    own += of_own;
    add(kind, of, crossed);
  });
  add(kOwn, pair, own);
  if (!is_column) return;
  if (column == problem.dim) {
    p.grad_biases[pair] = gradient;
  } else {
    p.grad_weights[pair * problem.dim + column] = gradient;
  }
}

// Adds to the gradient of this block's rows of a pair the part of its risk under one discriminator, or writes it if it
// is the first. A warp takes one row at a time, a lane always the same columns.
template <typename S>
ITM_FAST_DEVICE void add_to_rows(const DomainBackward<S>& p, const DomainRows<S>& rows, int64_t pair, int64_t share,
                                 int64_t discriminator, float factor, bool begins) {
  const DomainProblem<S>& problem = p.problem;
  const float* weights = problem.weights + discriminator * problem.dim;
  for (int64_t i = share * kDomainWarps + warp(); i < rows.n_rows; i += kDomainShares * kDomainWarps) {
    const bool is_region = i < rows.n_regions;
    float* side = is_region ? p.grad_regions : p.grad_words;
    if (side == nullptr) continue;  // The whole warp continues.
    const int64_t at = is_region ? problem.regions.offset(pair) + i : problem.words.offset(pair) + i - rows.n_regions;
    float* out = side + at * problem.dim;
    float slope = 0.0f;
    if (factor != 0.0f) {
      const float sign = rows.sign(i);
      const float x = sign * discriminate(rows.row(i), weights, problem.biases[discriminator], problem.dim);
      slope = factor * problem.scale(rows.n_rows) * sign * slope_of(x);
    }
    for (int64_t column = lane(); column < problem.dim; column += 32) {
      const float before = begins ? 0.0f : out[column];
      out[column] = factor != 0.0f ? before + slope * weights[column] : before;
    }
  }
}

// Grid: kDomainShares blocks per pair.
template <typename S>
ITM_FAST_DEVICE void feature_gradients(const DomainBackward<S>& p) {
  const int64_t pair = block_index() / kDomainShares, share = block_index() % kDomainShares;
  const DomainRows<S> rows(p.problem, pair);
  float own = own_gradient(p, pair);
  bool begins = true;
  const auto add = [&](int64_t discriminator, float factor) {
    if (factor == 0.0f && !begins) return;  // Without a term the gradient is zero.
    add_to_rows(p, rows, pair, share, discriminator, factor, begins);
    begins = false;
  };
  for (int kind = kByCaption; kind < p.problem.kinds; ++kind) {
    const float factor = has_foreign_features(kind) ? 0.0f : -p.through_hinge(kind, pair);
    if (factor != 0.0f) add(p.problem.other(kind, pair), factor);
  }
  for_negatives_of<true>(p, pair, [&](int, int64_t of, float of_own, float crossed) {
    own += of_own;
    add(of, crossed);
  });
  add(pair, own);
}

}  // namespace itm_fast::cuda
