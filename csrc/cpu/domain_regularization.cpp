// domain_regularization on the CPU: one pass over the features, each set with all discriminators that see it.
//
// The task of a feature set computes its risks and their derivatives by each discriminator. No two threads add to the
// same number, so results do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "cpu/domain_risks.h"
#include "itm_fast/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

// Writes the risks of one pair's features, and their derivatives if `sums` is not null.
template <typename S, typename T>
void write_risks(const DomainProblem<S, T>& problem, const RisksOfFeatures& list, int64_t pair, DomainSet<S, T>& set,
                 T* scratch, T* risks, T* sums) {
  const auto& table = domain_kernels(S{});
  const int64_t dim = problem.dim;
  const T scale = problem.scale(pair);
  int64_t next = list.first[pair];
  set.take(pair);
  list.for_discriminators(pair, [&](const std::vector<int64_t>& discriminators) {
    const int64_t n = static_cast<int64_t>(discriminators.size());
    set.meet(discriminators);
    double of_discriminator[kDiscriminatorsTogether] = {}, of_bias[kDiscriminatorsTogether] = {};
    T* factors = set.factors();
    for (int64_t row = 0; row < set.n_regions + set.n_words; ++row) {
      const T sign = row < set.n_regions ? T(-1) : T(1);
      for (int64_t e = 0; e < n; ++e) {
        const RowLoss<T> loss(sign * factors[row * n + e]);
        of_discriminator[e] += loss.value;
        factors[row * n + e] = scale * sign * loss.slope;
        of_bias[e] += factors[row * n + e];
      }
    }
    if (sums != nullptr) {
      std::fill_n(scratch, n * dim, T(0));
      table.add_rows(factors, n, set.regions, set.n_regions, dim, scratch);
      table.add_rows(factors + set.n_regions * n, n, set.words, set.n_words, dim, scratch);
    }
    for (int64_t e = 0; e < n; ++e) {
      for (; next < list.first[pair + 1] && list.risks[next].discriminator == discriminators[e]; ++next) {
        const int64_t at = list.risks[next].kind * problem.pairs + list.risks[next].pair;
        risks[at] = static_cast<T>(scale * of_discriminator[e]);
        if (sums == nullptr) continue;
        std::copy_n(scratch + e * dim, dim, sums + at * (dim + 1));
        sums[at * (dim + 1) + dim] = static_cast<T>(of_bias[e]);
      }
    }
  });
}

template <typename S, typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const DomainInputs& inputs, const DomainOptions& options,
                                                   bool for_weights) {
  const DomainProblem<S, T> problem(inputs, options);
  const int64_t pairs = problem.pairs, kinds = problem.kinds, width = problem.dim + 1;
  Tensor adversarial = torch::stable::new_empty(inputs.weights, {pairs});
  Tensor regularization = torch::stable::new_empty(inputs.weights, {pairs});
  Tensor risks = torch::stable::new_empty(inputs.weights, {kinds, pairs});
  Tensor sums = torch::stable::new_empty(inputs.weights, {for_weights ? kinds : 0, pairs, width});
  T* risk = static_cast<T*>(risks.mutable_data_ptr());
  T* sum = for_weights ? static_cast<T*>(sums.mutable_data_ptr()) : nullptr;
  for (int64_t kind = 0; kind < kinds; ++kind) {
    for (int64_t p = 0; p < pairs; ++p) {
      if (problem.other(kind, p) >= 0) continue;
      risk[kind * pairs + p] = T(0);
      if (for_weights) std::fill_n(sum + (kind * pairs + p) * width, width, T(0));
    }
  }

  const RisksOfFeatures list(problem, [](int64_t, int64_t) { return true; });
  struct State {
    DomainSet<S, T> set;
    Buffer<T> scratch;
  };
  share_tasks<State>(
      pairs,
      [&] {
        return State{DomainSet<S, T>(problem), Buffer<T>(for_weights ? kDiscriminatorsTogether * problem.dim : 0)};
      },
      [&](int64_t pair, State& state) {
        write_risks(problem, list, pair, state.set, state.scratch.data(), risk, sum);
      });

  T* of_own = static_cast<T*>(adversarial.mutable_data_ptr());
  T* of_others = static_cast<T*>(regularization.mutable_data_ptr());
  std::copy_n(risk, pairs, of_own);
  for (int64_t p = 0; p < pairs; ++p) {
    of_others[p] = T(0);
    for (int64_t kind = kByCaption; kind < kinds; ++kind) {
      if (problem.other(kind, p) < 0) continue;
      of_others[p] += hinge(problem.margin, risk[problem.features(kind, p)], risk[kind * pairs + p]);
    }
  }
  return {adversarial, regularization, risks, sums};
}

// The gradient of the results with respect to each risk, (kinds, pairs).
template <typename S, typename T>
std::vector<T> risk_gradients(const DomainProblem<S, T>& problem, const T* risks, const T* grad_adversarial,
                              const T* grad_regularization) {
  const int64_t pairs = problem.pairs;
  std::vector<T> found(problem.kinds * pairs, T(0));
  std::copy_n(grad_adversarial, pairs, found.begin());
  for (int64_t p = 0; p < pairs; ++p) {
    for (int64_t kind = kByCaption; kind < problem.kinds; ++kind) {
      const int64_t other = problem.other(kind, p);
      // If a pair is its own negative, both risks of the hinge are equal and would cancel up to rounding.
      if (other < 0 || other == p) continue;
      const int64_t features = problem.features(kind, p);
      if (hinge(problem.margin, risks[features], risks[kind * pairs + p]) == T(0)) continue;
      found[features] += grad_regularization[p];
      found[kind * pairs + p] = -grad_regularization[p];
    }
  }
  return found;
}

template <typename S, typename T>
void write_weight_gradients(const DomainProblem<S, T>& problem, const std::vector<T>& gradients, const T* sums,
                            T* grad_weights, T* grad_biases) {
  const int64_t pairs = problem.pairs, dim = problem.dim;
  std::vector<std::vector<int64_t>> of_discriminator(pairs);
  for (int64_t at = 0; at < problem.kinds * pairs; ++at) {
    if (gradients[at] != T(0)) of_discriminator[problem.discriminator(at / pairs, at % pairs)].push_back(at);
  }
  torch::stable::parallel_for(0, pairs, 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      T* out = grad_weights + p * dim;
      std::fill_n(out, dim, T(0));
      grad_biases[p] = T(0);
      for (const int64_t at : of_discriminator[p]) {
        const T* sum = sums + at * (dim + 1);
        for (int64_t d = 0; d < dim; ++d) out[d] += gradients[at] * sum[d];
        grad_biases[p] += gradients[at] * sum[dim];
      }
    }
  });
}

// The gradient of one side's rows in their storage dtype. Rows behind the last set stay zero.
template <typename S, typename T>
struct RowsOut {
  RowsOut(const Tensor& values, bool wanted)
      : gradient(torch::stable::new_zeros(values, {wanted ? values.size(0) : 0, values.size(1)}, kScalarType<S>)),
        out(wanted ? static_cast<S*>(gradient.mutable_data_ptr()) : nullptr) {}
  Tensor gradient;
  S* out;
};

// Adds factors times weights to the rows of one side of a set.
template <typename S, typename T>
void write_rows(const T* gradient, int64_t first_row, int64_t n_rows, int64_t dim, S* out) {
  if constexpr (std::is_same_v<S, T>) {
    std::copy_n(gradient, n_rows * dim, out + first_row * dim);
  } else {
    domain_kernels(S{}).narrow(gradient, n_rows * dim, out + first_row * dim);
  }
}

template <typename S, typename T>
void write_feature_gradients(const DomainProblem<S, T>& problem, const std::vector<T>& gradients,
                             RowsOut<S, T>& regions, RowsOut<S, T>& words) {
  const auto& table = domain_kernels(S{});
  const int64_t pairs = problem.pairs, dim = problem.dim;
  const RisksOfFeatures list(problem,
                             [&](int64_t kind, int64_t pair) { return gradients[kind * pairs + pair] != T(0); });
  struct State {
    DomainSet<S, T> set;
    Buffer<T> gradient;
  };
  const auto run = [&](int64_t pair, State& state) {
    DomainSet<S, T>& set = state.set;
    set.take(pair);
    const T scale = problem.scale(pair);
    T* of_words = state.gradient.data() + set.n_regions * dim;
    std::fill_n(state.gradient.data(), (set.n_regions + set.n_words) * dim, T(0));
    int64_t next = list.first[pair];
    list.for_discriminators(pair, [&](const std::vector<int64_t>& discriminators) {
      const int64_t n = static_cast<int64_t>(discriminators.size());
      T incoming[kDiscriminatorsTogether] = {};
      for (int64_t e = 0; e < n; ++e) {
        for (; next < list.first[pair + 1] && list.risks[next].discriminator == discriminators[e]; ++next) {
          incoming[e] += gradients[list.risks[next].kind * pairs + list.risks[next].pair];
        }
      }
      set.meet(discriminators);
      T* factors = set.factors();
      for (int64_t row = 0; row < set.n_regions + set.n_words; ++row) {
        const T sign = row < set.n_regions ? T(-1) : T(1);
        for (int64_t e = 0; e < n; ++e) {
          T& factor = factors[row * n + e];
          factor = incoming[e] * scale * sign * RowLoss<T>(sign * factor).slope;
        }
      }
      if (regions.out != nullptr) {
        table.add_weights(factors, set.n_regions, set.weights(), n, dim, state.gradient.data());
      }
      if (words.out != nullptr) {
        table.add_weights(factors + set.n_regions * n, set.n_words, set.weights(), n, dim, of_words);
      }
    });
    if (regions.out != nullptr) {
      write_rows(state.gradient.data(), problem.regions.view.offsets[pair], set.n_regions, dim, regions.out);
    }
    if (words.out != nullptr) write_rows(of_words, problem.words.view.offsets[pair], set.n_words, dim, words.out);
  };
  share_tasks<State>(pairs, [&] { return State{DomainSet<S, T>(problem), Buffer<T>(problem.max_rows() * dim)}; }, run);
}

template <typename S, typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_adversarial, const Tensor& grad_regularization,
                                                    const DomainInputs& inputs, const Tensor& risks, const Tensor& sums,
                                                    const DomainOptions& options, bool for_regions, bool for_words,
                                                    bool for_weights) {
  const DomainProblem<S, T> problem(inputs, options);
  const Tensor of_own = torch::stable::contiguous(grad_adversarial);
  const Tensor of_others = torch::stable::contiguous(grad_regularization);
  const Tensor kept_risks = torch::stable::contiguous(risks), kept_sums = torch::stable::contiguous(sums);
  const std::vector<T> gradients =
      risk_gradients(problem, static_cast<const T*>(kept_risks.const_data_ptr()),
                     static_cast<const T*>(of_own.const_data_ptr()), static_cast<const T*>(of_others.const_data_ptr()));
  Tensor grad_weights = torch::stable::new_empty(inputs.weights, {for_weights ? problem.pairs : 0, problem.dim});
  Tensor grad_biases = torch::stable::new_empty(inputs.weights, {for_weights ? problem.pairs : 0});
  if (for_weights) {
    write_weight_gradients(problem, gradients, static_cast<const T*>(kept_sums.const_data_ptr()),
                           static_cast<T*>(grad_weights.mutable_data_ptr()),
                           static_cast<T*>(grad_biases.mutable_data_ptr()));
  }
  RowsOut<S, T> regions(inputs.regions, for_regions), words(inputs.words, for_words);
  if (for_regions || for_words) write_feature_gradients(problem, gradients, regions, words);
  const auto dtype = inputs.regions.scalar_type();
  return {torch::stable::to(regions.gradient, dtype), torch::stable::to(words.gradient, dtype), grad_weights,
          grad_biases};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> domain_regularization(
    const Tensor& regions, const Tensor& region_offsets, const Tensor& words, const Tensor& word_offsets,
    const Tensor& weights, const Tensor& biases, const std::optional<Tensor>& negative_captions,
    const std::optional<Tensor>& negative_images, double margin, const std::string& aggregation, bool for_weights) {
  const DomainInputs inputs{regions, region_offsets,    words,          word_offsets, weights,
                            biases,  negative_captions, negative_images};
  check_domain_inputs(inputs);
  const DomainOptions options = domain_options(margin, aggregation);
  return with_types(regions.scalar_type(),
                    [&]<typename S, typename T>(S, T) { return forward<S, T>(inputs, options, for_weights); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> domain_regularization_backward(
    const Tensor& grad_adversarial, const Tensor& grad_regularization, const Tensor& regions,
    const Tensor& region_offsets, const Tensor& words, const Tensor& word_offsets, const Tensor& weights,
    const Tensor& biases, const std::optional<Tensor>& negative_captions, const std::optional<Tensor>& negative_images,
    const Tensor& risks, const Tensor& sums, double margin, const std::string& aggregation, bool for_regions,
    bool for_words, bool for_weights) {
  const DomainInputs inputs{regions, region_offsets,    words,          word_offsets, weights,
                            biases,  negative_captions, negative_images};
  check_domain_inputs(inputs);
  check_domain_gradient(grad_adversarial, grad_regularization, inputs, risks, sums, for_weights);
  const DomainOptions options = domain_options(margin, aggregation);
  return with_types(regions.scalar_type(), [&]<typename S, typename T>(S, T) {
    return backward<S, T>(grad_adversarial, grad_regularization, inputs, risks, sums, options, for_regions, for_words,
                          for_weights);
  });
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("domain_regularization", TORCH_BOX(&itm_fast::domain_regularization));
  m.impl("domain_regularization_backward", TORCH_BOX(&itm_fast::domain_regularization_backward));
}
