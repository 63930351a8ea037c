// The kernels of domain_regularization in the shim. Each function returns an error message or an empty string.
#include <algorithm>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/domain_regularization_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

struct Settings {
  uint64_t seed;
  int64_t pairs, dim, region_rows, word_rows, wide_offsets, averages;
  double margin;
};

// The inputs in memory of their exact size. Both kinds of negatives are null, or neither.
template <typename S>
struct Operands {
  Operands(const Settings& s, const void* regions, const int64_t* region_offsets, const void* words,
           const int64_t* word_offsets, const float* weights, const float* biases, const int64_t* captions,
           const int64_t* images)
      : regions(static_cast<const S*>(regions), s.region_rows * s.dim),
        words(static_cast<const S*>(words), s.word_rows * s.dim),
        wide_regions(region_offsets, region_offsets + s.pairs + 1),
        wide_words(word_offsets, word_offsets + s.pairs + 1),
        narrow_regions(region_offsets, region_offsets + s.pairs + 1),
        narrow_words(word_offsets, word_offsets + s.pairs + 1),
        weights(weights, s.pairs * s.dim),
        biases(biases, s.pairs),
        captions(captions, s.pairs),
        images(images, s.pairs) {
    const bool wide = s.wide_offsets != 0;
    const auto offsets = [&](const auto& of_64, const auto& of_32) {
      return wide ? static_cast<const void*>(of_64.data()) : static_cast<const void*>(of_32.data());
    };
    problem = {{this->regions.memory, offsets(wide_regions, narrow_regions), wide, s.pairs, s.region_rows},
               {this->words.memory, offsets(wide_words, narrow_words), wide, s.pairs, s.word_rows},
               this->weights.memory,
               this->biases.memory,
               this->captions.memory,
               this->images.memory,
               s.pairs,
               s.dim,
               captions == nullptr ? 1 : static_cast<int>(kRiskKinds),
               static_cast<float>(s.margin),
               s.averages != 0};
  }

  const Exact<S> regions, words;
  const std::vector<int64_t> wide_regions, wide_words;
  const std::vector<int32_t> narrow_regions, narrow_words;
  const Exact<float> weights, biases;
  const Exact<int64_t> captions, images;
  DomainProblem<S> problem;
};

template <typename S>
const char* forward(const Settings& s, const Operands<S>& operands, float* adversarial, float* regularization,
                    float* risks, float* sums) {
  const int64_t n_risks = operands.problem.kinds * s.pairs;
  Exact<float> of_own(adversarial, s.pairs), of_others(regularization, s.pairs);
  Exact<float> kept(risks, n_risks), derivatives(sums, n_risks * (s.dim + 1));
  int32_t finished = 0;
  const DomainForward<S> p{operands.problem, kept.memory,      derivatives.memory,
                           of_own.memory,    of_others.memory, &finished};
  const std::string problem = shim::launch(risk_blocks(p.problem), kDomainThreads, s.seed, [&] { domain_risks(p); });
  std::copy_n(of_own.memory, s.pairs, adversarial);
  std::copy_n(of_others.memory, s.pairs, regularization);
  std::copy_n(kept.memory, n_risks, risks);
  if (sums != nullptr) std::copy_n(derivatives.memory, n_risks * (s.dim + 1), sums);
  return report(problem);
}

template <typename S>
const char* backward(const Settings& s, const Operands<S>& operands, const float* grad_adversarial,
                     const float* grad_regularization, const float* risks, const float* sums, float* grad_regions,
                     float* grad_words, float* grad_weights, float* grad_biases) {
  const int64_t n_risks = operands.problem.kinds * s.pairs;
  const Exact<float> of_own(grad_adversarial, s.pairs), of_others(grad_regularization, s.pairs);
  const Exact<float> kept(risks, n_risks), derivatives(sums, n_risks * (s.dim + 1));
  Exact<float> of_regions(grad_regions, s.region_rows * s.dim), of_words(grad_words, s.word_rows * s.dim);
  Exact<float> of_weights(grad_weights, s.pairs * s.dim), of_biases(grad_biases, s.pairs);
  const DomainBackward<S> p{operands.problem,  kept.memory,     derivatives.memory, of_own.memory,   of_others.memory,
                            of_regions.memory, of_words.memory, of_weights.memory,  of_biases.memory};
  std::string problem;
  if (grad_weights != nullptr) {
    problem =
        shim::launch(discriminator_blocks(p.problem), kDomainThreads, s.seed, [&] { discriminator_gradients(p); });
    std::copy_n(of_weights.memory, s.pairs * s.dim, grad_weights);
    std::copy_n(of_biases.memory, s.pairs, grad_biases);
  }
  if (problem.empty() && (grad_regions != nullptr || grad_words != nullptr)) {
    problem = shim::launch(feature_blocks(p.problem), kDomainThreads, s.seed + 1, [&] { feature_gradients(p); });
    if (grad_regions != nullptr) std::copy_n(of_regions.memory, s.region_rows * s.dim, grad_regions);
    if (grad_words != nullptr) std::copy_n(of_words.memory, s.word_rows * s.dim, grad_words);
  }
  return report(problem);
}

}  // namespace

#define ITM_FAST_DOMAIN(name, S)                                                                                       \
  extern "C" const char* domain_forward_##name(const Settings* s, const void* regions, const int64_t* region_offsets,  \
                                               const void* words, const int64_t* word_offsets, const float* weights,   \
                                               const float* biases, const int64_t* captions, const int64_t* images,    \
                                               float* adversarial, float* regularization, float* risks, float* sums) { \
    const Operands<S> operands(*s, regions, region_offsets, words, word_offsets, weights, biases, captions, images);   \
    return forward<S>(*s, operands, adversarial, regularization, risks, sums);                                         \
  }                                                                                                                    \
  extern "C" const char* domain_backward_##name(                                                                       \
      const Settings* s, const void* regions, const int64_t* region_offsets, const void* words,                        \
      const int64_t* word_offsets, const float* weights, const float* biases, const int64_t* captions,                 \
      const int64_t* images, const float* grad_adversarial, const float* grad_regularization, const float* risks,      \
      const float* sums, float* grad_regions, float* grad_words, float* grad_weights, float* grad_biases) {            \
    const Operands<S> operands(*s, regions, region_offsets, words, word_offsets, weights, biases, captions, images);   \
    return backward<S>(*s, operands, grad_adversarial, grad_regularization, risks, sums, grad_regions, grad_words,     \
                       grad_weights, grad_biases);                                                                     \
  }
ITM_FAST_DOMAIN(float32, float)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_DOMAIN(bfloat16, BFloat16)
ITM_FAST_DOMAIN(float16, Half)
#endif
