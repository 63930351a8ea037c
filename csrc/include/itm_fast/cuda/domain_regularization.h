// The forward of domain_regularization on a GPU: one launch for the risks, their derivatives and both results.
//
// A block computes one risk. A warp multiplies one row at a time with the weights of the discriminator; then a thread
// takes one column at a time and sums the derivative with respect to the weights over all rows. So one block computes
// each number, in a fixed order. The last block to finish computes the results of all pairs from the risks.
#pragma once

#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/set_tiles.h"
#include "itm_fast/domain_regularization.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast::cuda {

inline constexpr int kDomainThreads = 256;
inline constexpr int kDomainWarps = kDomainThreads / 32;
// Rows with factors in shared memory at a time.
inline constexpr int kDomainRows = 64;

template <typename S>
struct DomainProblem {
  SetRows<S> regions, words;
  const float* weights;     // (pairs, dim)
  const float* biases;      // (pairs,)
  const int64_t* captions;  // (pairs,) negatives, or null
  const int64_t* images;
  int64_t pairs, dim;
  int kinds;
  float margin;
  bool averages;

  // The other pair of a kind of risk, or -1 if it does not exist; p itself for its own risk.
  ITM_FAST_DEVICE int64_t other(int kind, int64_t pair) const {
    if (kind == kOwn) return pair;
    const int64_t found = (is_of_caption(kind) ? captions : images)[pair];
    return found >= 0 && found < pairs ? found : -1;
  }
  // The factor of a risk of `rows` rows.
  ITM_FAST_DEVICE float scale(int64_t rows) const {
    return averages && rows > 1 ? 1.0f / static_cast<float>(rows) : 1.0f;
  }
};

template <typename S>
struct DomainForward {
  DomainProblem<S> problem;
  float* risks;           // (kinds, pairs)
  float* sums;            // (kinds, pairs, dim + 1), the derivatives by weights and bias; null if not requested
  float* adversarial;     // (pairs,)
  float* regularization;  // (pairs,)
  int32_t* finished;      // zero: finished blocks
};

// The rows of one pair, regions before words.
template <typename S>
struct DomainRows {
  const S* regions;
  const S* words;
  int64_t n_regions, n_rows, dim;

  ITM_FAST_DEVICE DomainRows(const DomainProblem<S>& p, int64_t pair)
      : regions(p.regions.values + p.regions.offset(pair) * p.dim),
        words(p.words.values + p.words.offset(pair) * p.dim),
        n_regions(p.regions.length(pair)),
        n_rows(n_regions + p.words.length(pair)),
        dim(p.dim) {}
  ITM_FAST_DEVICE const S* row(int64_t index) const {
    return index < n_regions ? regions + index * dim : words + (index - n_regions) * dim;
  }
  // The loss of a row is log(1 + exp(sign (W x + b))).
  ITM_FAST_DEVICE float sign(int64_t index) const { return index < n_regions ? -1.0f : 1.0f; }
};

// W x + b, for every lane of the warp.
template <typename S>
ITM_FAST_DEVICE float discriminate(const S* row, const float* weights, float bias, int64_t dim) {
  float sum = 0.0f;
  for (int64_t column = lane(); column < dim; column += 32) sum += widen(row[column]) * weights[column];
  for (int distance = 16; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
  return sum + bias;
}

// The derivative of log(1 + e^x).
ITM_FAST_DEVICE float slope_of(float x) {
  const float small = exponential(x > 0.0f ? -x : x);
  return (x > 0.0f ? 1.0f : small) / (1.0f + small);
}

// The risk of the rows under one discriminator, and its derivative; computed by the whole block.
template <typename S>
ITM_FAST_DEVICE float risk_of(const DomainRows<S>& rows, const float* weights, float bias, float scale, float* sums) {
  ITM_FAST_SHARED(float, factors, kDomainRows);
  ITM_FAST_SHARED(float, losses, kDomainRows);
  double risk = 0.0, of_bias = 0.0;  // of the first thread
  for (int64_t first = 0; first < rows.n_rows; first += kDomainRows) {
    const int64_t left = rows.n_rows - first, held = left < kDomainRows ? left : kDomainRows;
    barrier();  // All have read what was held before.
    for (int64_t i = warp(); i < held; i += kDomainWarps) {
      const float sign = rows.sign(first + i);
      const float x = sign * discriminate(rows.row(first + i), weights, bias, rows.dim);
      if (lane() != 0) continue;
      losses[i] = (x > 0.0f ? x : 0.0f) + logarithm_of_one_plus(exponential(x > 0.0f ? -x : x));
      factors[i] = scale * sign * slope_of(x);
    }
    barrier();
    if (thread_index() == 0) {
      for (int64_t i = 0; i < held; ++i) {
        risk += static_cast<float>(losses[i]);
        of_bias += static_cast<float>(factors[i]);
      }
    }
    if (sums == nullptr) continue;
    for (int64_t column = thread_index(); column < rows.dim; column += block_threads()) {
      float sum = first == 0 ? 0.0f : sums[column];
      for (int64_t i = 0; i < held; ++i) sum += factors[i] * widen(rows.row(first + i)[column]);
      sums[column] = sum;
    }
  }
  if (sums != nullptr && thread_index() == 0) sums[rows.dim] = static_cast<float>(of_bias);
  return static_cast<float>(scale * risk);
}

// Both results of the pairs that a thread takes; called by the last block.
template <typename S>
ITM_FAST_DEVICE void finish_pairs_of(const DomainForward<S>& p) {
  const int64_t pairs = p.problem.pairs;
  for (int64_t pair = thread_index(); pair < pairs; pair += block_threads()) {
    const float own = load_coherent(p.risks + pair);
    float total = 0.0f;
    for (int kind = kByCaption; kind < p.problem.kinds; ++kind) {
      const int64_t other = p.problem.other(kind, pair);
      if (other < 0) continue;
      const float of_features = has_foreign_features(kind) ? load_coherent(p.risks + other) : own;
      total += hinge(p.problem.margin, of_features, load_coherent(p.risks + kind * pairs + pair));
    }
    p.adversarial[pair] = own;
    p.regularization[pair] = total;
  }
}

// Grid: one block per risk, pair by pair for each kind.
template <typename S>
ITM_FAST_DEVICE void domain_risks(const DomainForward<S>& p) {
  ITM_FAST_SHARED(int32_t, is_last, 1);
  const DomainProblem<S>& problem = p.problem;
  const int kind = static_cast<int>(block_index() / problem.pairs);
  const int64_t pair = block_index() % problem.pairs, other = problem.other(kind, pair);
  float* sums = p.sums == nullptr ? nullptr : p.sums + block_index() * (problem.dim + 1);
  float risk = 0.0f;
  if (other >= 0) {
    const DomainRows<S> rows(problem, has_foreign_features(kind) ? other : pair);
    const int64_t discriminator = has_foreign_features(kind) ? pair : other;
    if (rows.n_rows > 0) {
      const float* weights = problem.weights + discriminator * problem.dim;
      risk = risk_of(rows, weights, problem.biases[discriminator], problem.scale(rows.n_rows), sums);
      sums = nullptr;
    }
  }
  // Sums without a term are zero.
  if (sums != nullptr) {
    for (int64_t column = thread_index(); column <= problem.dim; column += block_threads()) sums[column] = 0.0f;
  }
  if (thread_index() == 0) {
    p.risks[block_index()] = risk;
    memory_fence();
    is_last[0] = atomic_add(p.finished, 1) == grid_blocks() - 1;
  }
  barrier();
  if (is_last[0] == 0) return;  // The whole block returns.
  memory_fence();
  finish_pairs_of(p);
}

}  // namespace itm_fast::cuda
