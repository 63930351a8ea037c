// domain_regularization on CUDA: one launch for the results, one for the gradients of the discriminators, and one for
// those of the features.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "cuda/cross_attention_operands.h"
#include "cuda/launch.h"
#include "itm_fast/cuda/domain_regularization_launch.h"
#include "ops/domain_regularization.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// See domain_risks, discriminator_gradients and feature_gradients for the grids and for which block writes what.
template <typename S>
__global__ void __launch_bounds__(kDomainThreads) domain_risks_kernel(const DomainForward<S> parameters) {
  domain_risks(parameters);
}

template <typename S>
__global__ void __launch_bounds__(kDomainThreads) discriminator_gradients_kernel(const DomainBackward<S> parameters) {
  discriminator_gradients(parameters);
}

template <typename S>
__global__ void __launch_bounds__(kDomainThreads) feature_gradients_kernel(const DomainBackward<S> parameters) {
  feature_gradients(parameters);
}

// The operands, dense.
template <typename S>
struct DomainOperands {
  explicit DomainOperands(const DomainInputs& inputs)
      : regions(inputs.regions, inputs.region_offsets),
        words(inputs.words, inputs.word_offsets),
        weights(torch::stable::contiguous(inputs.weights)),
        biases(torch::stable::contiguous(inputs.biases)) {
    if (inputs.negative_captions) captions = torch::stable::contiguous(*inputs.negative_captions);
    if (inputs.negative_images) images = torch::stable::contiguous(*inputs.negative_images);
  }

  DomainProblem<S> problem(const DomainInputs& inputs, const DomainOptions& options) const {
    return {regions.rows(),
            words.rows(),
            data_of<float>(weights),
            data_of<float>(biases),
            data_of<int64_t>(captions),
            data_of<int64_t>(images),
            inputs.pairs(),
            inputs.dim(),
            static_cast<int>(inputs.kinds()),
            static_cast<float>(options.margin),
            options.aggregation == RiskAggregation::mean};
  }

  Operand<S> regions, words;
  Tensor weights, biases;
  std::optional<Tensor> captions, images;
};

template <typename S>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const DomainInputs& inputs, const DomainOptions& options,
                                                   bool for_weights) {
  const int64_t pairs = inputs.pairs(), kinds = inputs.kinds();
  const DeviceStream device(inputs.regions);
  const DomainOperands<S> operands(inputs);
  Tensor adversarial = torch::stable::new_empty(inputs.weights, {pairs});
  Tensor regularization = torch::stable::new_empty(inputs.weights, {pairs});
  Tensor risks = torch::stable::new_empty(inputs.weights, {kinds, pairs});
  Tensor sums = torch::stable::new_empty(inputs.weights, {for_weights ? kinds : 0, pairs, inputs.dim() + 1});
  if (pairs == 0) return {adversarial, regularization, risks, sums};
  const Tensor finished = scratch(inputs.weights, sizeof(int32_t));
  device.set_zero(finished.mutable_data_ptr(), sizeof(int32_t));
  const DomainForward<S> p{operands.problem(inputs, options),
                           mutable_data_of<float>(risks),
                           for_weights ? mutable_data_of<float>(sums) : nullptr,
                           mutable_data_of<float>(adversarial),
                           mutable_data_of<float>(regularization),
                           mutable_data_of<int32_t>(finished)};
  device.launch(domain_risks_kernel<S>, risk_blocks(p.problem), kDomainThreads, p);
  return {adversarial, regularization, risks, sums};
}

template <typename S>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_adversarial, const Tensor& grad_regularization,
                                                    const DomainInputs& inputs, const Tensor& risks, const Tensor& sums,
                                                    const DomainOptions& options, bool for_regions, bool for_words,
                                                    bool for_weights) {
  const int64_t pairs = inputs.pairs(), dim = inputs.dim();
  const DeviceStream device(inputs.regions);
  const DomainOperands<S> operands(inputs);
  const Tensor of_own = torch::stable::contiguous(grad_adversarial);
  const Tensor of_others = torch::stable::contiguous(grad_regularization);
  const Tensor kept_risks = torch::stable::contiguous(risks), kept_sums = torch::stable::contiguous(sums);
  // Rows behind the last set stay zero.
  const auto rows_like = [&](const Tensor& values, bool wanted) {
    return torch::stable::new_zeros(values, {wanted ? values.size(0) : 0, dim}, ScalarType::Float);
  };
  const Tensor grad_regions = rows_like(inputs.regions, for_regions), grad_words = rows_like(inputs.words, for_words);
  Tensor grad_weights = torch::stable::new_empty(inputs.weights, {for_weights ? pairs : 0, dim});
  Tensor grad_biases = torch::stable::new_empty(inputs.weights, {for_weights ? pairs : 0});
  DomainBackward<S> p{};
  p.problem = operands.problem(inputs, options);
  p.risks = data_of<float>(kept_risks);
  p.sums = data_of<float>(kept_sums);
  p.grad_adversarial = data_of<float>(of_own);
  p.grad_regularization = data_of<float>(of_others);
  p.grad_regions = for_regions ? mutable_data_of<float>(grad_regions) : nullptr;
  p.grad_words = for_words ? mutable_data_of<float>(grad_words) : nullptr;
  p.grad_weights = mutable_data_of<float>(grad_weights);
  p.grad_biases = mutable_data_of<float>(grad_biases);
  if (for_weights && pairs > 0) {
    device.launch(discriminator_gradients_kernel<S>, discriminator_blocks(p.problem), kDomainThreads, p);
  }
  if ((for_regions || for_words) && pairs > 0) {
    device.launch(feature_gradients_kernel<S>, feature_blocks(p.problem), kDomainThreads, p);
  }
  const ScalarType dtype = inputs.regions.scalar_type();
  return {torch::stable::to(grad_regions, dtype), torch::stable::to(grad_words, dtype), grad_weights, grad_biases};
}

void check_not_double(const Tensor& regions) {
  STD_TORCH_CHECK(regions.scalar_type() != ScalarType::Double,
                  "regions: no CUDA kernel computes domain regularization in float64");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> domain_regularization(
    const Tensor& regions, const Tensor& region_offsets, const Tensor& words, const Tensor& word_offsets,
    const Tensor& weights, const Tensor& biases, const std::optional<Tensor>& negative_captions,
    const std::optional<Tensor>& negative_images, double margin, const std::string& aggregation, bool for_weights) {
  const DomainInputs inputs{regions, region_offsets,    words,          word_offsets, weights,
                            biases,  negative_captions, negative_images};
  check_domain_inputs(inputs);
  const DomainOptions options = domain_options(margin, aggregation);
  check_not_double(regions);
  return with_rows(regions.scalar_type(), [&]<typename S>(S) { return forward<S>(inputs, options, for_weights); });
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
  check_not_double(regions);
  return with_rows(regions.scalar_type(), [&]<typename S>(S) {
    return backward<S>(grad_adversarial, grad_regularization, inputs, risks, sums, options, for_regions, for_words,
                       for_weights);
  });
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("domain_regularization", TORCH_BOX(&itm_fast::cuda::domain_regularization));
  m.impl("domain_regularization_backward", TORCH_BOX(&itm_fast::cuda::domain_regularization_backward));
}
