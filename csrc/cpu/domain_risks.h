// Shared by forward and backward of domain_regularization on the CPU: the operands, which discriminators see which
// features, and the products of a set with them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/cross_attention.h"
#include "cpu/kernels/domain_regularization.h"
#include "cpu/kernels/select.h"
#include "cpu/memory.h"
#include "ops/domain_regularization.h"

namespace itm_fast {

inline const DomainKernels<float, float>& domain_kernels(float) { ITM_FAST_RETURN_SELECTED(kDomainFloat32) }
inline const DomainKernels<double, double>& domain_kernels(double) { ITM_FAST_RETURN_SELECTED(kDomainFloat64) }
inline const DomainKernels<BFloat16, float>& domain_kernels(BFloat16) { ITM_FAST_RETURN_SELECTED(kDomainBFloat16) }

// Discriminators processed together for a set: the number of weights packed beside its rows.
constexpr int64_t kDiscriminatorsTogether = 16;

template <typename S, typename T>
struct DomainProblem {
  DomainProblem(const DomainInputs& inputs, const DomainOptions& options)
      : pairs(inputs.pairs()),
        dim(inputs.dim()),
        kinds(inputs.kinds()),
        margin(static_cast<T>(options.margin)),
        averages(options.aggregation == RiskAggregation::mean),
        regions(inputs.regions, inputs.region_offsets),
        words(inputs.words, inputs.word_offsets),
        weights_(torch::stable::contiguous(inputs.weights)),
        biases_(torch::stable::contiguous(inputs.biases)),
        weights(static_cast<const T*>(weights_.const_data_ptr())),
        biases(static_cast<const T*>(biases_.const_data_ptr())) {
    if (kinds == 1) return;
    captions_ = torch::stable::contiguous(*inputs.negative_captions);
    images_ = torch::stable::contiguous(*inputs.negative_images);
  }

  // The other pair of a kind of risk, or -1 if it does not exist; p itself for its own risk.
  int64_t other(int64_t kind, int64_t pair) const {
    if (kind == kOwn) return pair;
    const Tensor& negatives = is_of_caption(kind) ? *captions_ : *images_;
    const int64_t found = static_cast<const int64_t*>(negatives.const_data_ptr())[pair];
    return found >= 0 && found < pairs ? found : -1;
  }
  int64_t features(int64_t kind, int64_t pair) const { return has_foreign_features(kind) ? other(kind, pair) : pair; }
  int64_t discriminator(int64_t kind, int64_t pair) const {
    return has_foreign_features(kind) ? pair : other(kind, pair);
  }
  // The factor of the pair's risks.
  T scale(int64_t pair) const {
    const int64_t rows = regions.view.length(pair) + words.view.length(pair);
    return averages && rows > 1 ? T(1) / static_cast<T>(rows) : T(1);
  }
  int64_t max_rows() const { return regions.max_length + words.max_length; }

  using Tensor = torch::stable::Tensor;
  const int64_t pairs, dim, kinds;
  const T margin;
  const bool averages;
  const Operand<S> regions, words;

 private:
  const Tensor weights_, biases_;
  std::optional<Tensor> captions_, images_;

 public:
  const T *const weights, *const biases;
};

// One risk, with its kind and pair.
struct Risk {
  int64_t discriminator, kind, pair;
  bool operator<(const Risk& other) const {
    return std::tie(discriminator, kind, pair) < std::tie(other.discriminator, other.kind, other.pair);
  }
};

// The risks of each pair's features, by discriminator: pair i has risks[first[i]] to risks[first[i + 1]].
struct RisksOfFeatures {
  template <typename S, typename T, typename Wanted>
  RisksOfFeatures(const DomainProblem<S, T>& problem, const Wanted& is_wanted) : first(problem.pairs + 1) {
    const auto each = [&](const auto& body) {
      for (int64_t kind = 0; kind < problem.kinds; ++kind) {
        for (int64_t pair = 0; pair < problem.pairs; ++pair) {
          if (problem.other(kind, pair) >= 0 && is_wanted(kind, pair)) body(kind, pair);
        }
      }
    };
    each([&](int64_t kind, int64_t pair) { ++first[problem.features(kind, pair) + 1]; });
    std::partial_sum(first.begin(), first.end(), first.begin());
    risks.resize(first.back());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    each([&](int64_t kind, int64_t pair) {
      risks[next[problem.features(kind, pair)]++] = {problem.discriminator(kind, pair), kind, pair};
    });
    for (int64_t i = 0; i < problem.pairs; ++i) std::sort(risks.begin() + first[i], risks.begin() + first[i + 1]);
  }

  // Calls body(discriminators) for the discriminators that see a pair's features: several at a time, each once.
  template <typename Body>
  void for_discriminators(int64_t pair, const Body& body) const {
    std::vector<int64_t> together;
    for (int64_t i = first[pair]; i < first[pair + 1]; ++i) {
      if (!together.empty() && together.back() == risks[i].discriminator) continue;
      if (together.size() == kDiscriminatorsTogether) {
        body(together);
        together.clear();
      }
      together.push_back(risks[i].discriminator);
    }
    if (!together.empty()) body(together);
  }

  std::vector<int64_t> first;
  std::vector<Risk> risks;
};

// A thread's memory for one set at a time, and the set that it holds.
template <typename S, typename T>
class DomainSet {
 public:
  explicit DomainSet(const DomainProblem<S, T>& problem)
      : problem_(problem),
        rows_(std::is_same_v<S, T> ? 0 : problem.max_rows() * problem.dim),
        weights_(kDiscriminatorsTogether * problem.dim),
        factors_(problem.max_rows() * kDiscriminatorsTogether) {}

  void take(int64_t pair) {
    n_regions = problem_.regions.view.length(pair);
    n_words = problem_.words.view.length(pair);
    regions = rows_of(problem_.regions.view, pair, rows_.data());
    words = rows_of(problem_.words.view, pair, rows_.data() + n_regions * problem_.dim);
  }

  // Computes weights and factors of these discriminators: a factor is W x + b of a row, regions before words.
  void meet(const std::vector<int64_t>& discriminators) {
    const int64_t n = static_cast<int64_t>(discriminators.size()), dim = problem_.dim;
    for (int64_t e = 0; e < n; ++e) {
      std::copy_n(problem_.weights + discriminators[e] * dim, dim, weights_.data() + e * dim);
    }
    const auto& table = domain_kernels(S{});
    table.products(regions, n_regions, weights_.data(), n, dim, factors_.data());
    table.products(words, n_words, weights_.data(), n, dim, factors_.data() + n_regions * n);
    for (int64_t row = 0; row < n_regions + n_words; ++row) {
      for (int64_t e = 0; e < n; ++e) factors_.data()[row * n + e] += problem_.biases[discriminators[e]];
    }
  }

  T* factors() { return factors_.data(); }
  const T* weights() const { return weights_.data(); }

  int64_t n_regions = 0, n_words = 0;
  const T *regions = nullptr, *words = nullptr;

 private:
  static const T* rows_of(const FragmentsView<S>& view, int64_t pair, T* buffer) {
    if constexpr (std::is_same_v<S, T>) {
      return view.set_values(pair);
    } else {
      domain_kernels(S{}).widen(view.set_values(pair), view.length(pair) * view.dim, buffer);
      return buffer;
    }
  }

  const DomainProblem<S, T>& problem_;
  Buffer<T> rows_, weights_, factors_;
};

// The loss log(1 + e^x) of one row and its derivative by x. For words x is W v + b, for regions its negative.
template <typename T>
struct RowLoss {
  explicit RowLoss(T x) {
    const T small = std::exp(-std::abs(x));
    value = (x > T(0) ? x : T(0)) + std::log1p(small);
    slope = (x > T(0) ? T(1) : small) / (T(1) + small);
  }
  T value, slope;
};

}  // namespace itm_fast
