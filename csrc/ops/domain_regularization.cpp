#include "ops/domain_regularization.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "ops/devices.h"
#include "ops/options.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_sets(const char* name, const Tensor& values, const char* offsets_name, const Tensor& offsets,
                const DomainInputs& inputs) {
  STD_TORCH_CHECK(values.dim() == 2 && values.size(1) == inputs.dim(), name, ": expected values of shape (N, ",
                  inputs.dim(), ")");
  STD_TORCH_CHECK(values.scalar_type() == inputs.regions.scalar_type(), name, ": expected the dtype of regions");
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) == inputs.pairs() + 1, offsets_name, ": expected shape (",
                  inputs.pairs() + 1, ",)");
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Int || offsets.scalar_type() == ScalarType::Long, offsets_name,
                  ": expected int32 or int64");
}

void check_negatives(const char* name, const Tensor& negatives, const DomainInputs& inputs) {
  STD_TORCH_CHECK(
      negatives.scalar_type() == ScalarType::Long && negatives.dim() == 1 && negatives.size(0) == inputs.pairs(), name,
      ": expected int64 of shape (", inputs.pairs(), ",)");
  check_same_device(name, negatives, "regions", inputs.regions);
}

}  // namespace

DomainOptions domain_options(double margin, const std::string& aggregation) {
  using namespace std::string_view_literals;
  return {margin, parse_option<RiskAggregation>("aggregation", aggregation, std::array{"sum"sv, "mean"sv})};
}

void check_domain_inputs(const DomainInputs& inputs) {
  const ScalarType dtype = inputs.regions.scalar_type();
  STD_TORCH_CHECK(inputs.weights.dim() == 2, "weights: expected shape (B, D), got ", inputs.weights.dim(),
                  " dimensions");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "regions: expected float32, float64, bfloat16 or float16 values");
  const ScalarType wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(inputs.weights.scalar_type() == wide, "weights: expected float32, or float64 for float64 regions");
  STD_TORCH_CHECK(
      inputs.biases.scalar_type() == wide && inputs.biases.dim() == 1 && inputs.biases.size(0) == inputs.pairs(),
      "biases: expected shape (", inputs.pairs(), ",) and the dtype of weights");
  check_sets("regions", inputs.regions, "region_offsets", inputs.region_offsets, inputs);
  check_sets("words", inputs.words, "word_offsets", inputs.word_offsets, inputs);
  check_same_device("region_offsets", inputs.region_offsets, "regions", inputs.regions);
  check_same_device("words", inputs.words, "regions", inputs.regions);
  check_same_device("word_offsets", inputs.word_offsets, "regions", inputs.regions);
  check_same_device("weights", inputs.weights, "regions", inputs.regions);
  check_same_device("biases", inputs.biases, "regions", inputs.regions);
  STD_TORCH_CHECK(inputs.negative_captions.has_value() == inputs.negative_images.has_value(),
                  "negative_captions and negative_images: expected both or neither");
  if (!inputs.negative_captions) return;
  check_negatives("negative_captions", *inputs.negative_captions, inputs);
  check_negatives("negative_images", *inputs.negative_images, inputs);
}

void check_domain_gradient(const Tensor& grad_adversarial, const Tensor& grad_regularization,
                           const DomainInputs& inputs, const Tensor& risks, const Tensor& sums, bool for_weights) {
  const int64_t pairs = inputs.pairs(), kinds = inputs.kinds();
  const ScalarType dtype = inputs.weights.scalar_type();
  const auto check_gradient = [&](const char* name, const Tensor& gradient) {
    STD_TORCH_CHECK(gradient.scalar_type() == dtype && gradient.dim() == 1 && gradient.size(0) == pairs, name,
                    ": expected shape (", pairs, ",) and the dtype of weights");
    check_same_device(name, gradient, "regions", inputs.regions);
  };
  check_gradient("grad_adversarial", grad_adversarial);
  check_gradient("grad_regularization", grad_regularization);
  STD_TORCH_CHECK(risks.scalar_type() == dtype && risks.dim() == 2 && risks.size(0) == kinds && risks.size(1) == pairs,
                  "risks: expected the third result of domain_regularization for the same operands");
  STD_TORCH_CHECK(!for_weights || (sums.scalar_type() == dtype && sums.dim() == 3 && sums.size(0) == kinds &&
                                   sums.size(1) == pairs && sums.size(2) == inputs.dim() + 1),
                  "sums: expected the fourth result of domain_regularization for the same operands, made for_weights");
  check_same_device("risks", risks, "regions", inputs.regions);
  check_same_device("sums", sums, "regions", inputs.regions);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// domain_regularization returns both results, the risks (kinds, B) and the derivative of each risk by weights and bias
// of its discriminator: (kinds, B, D + 1) with `for_weights`, else (0, B, D + 1). There are five kinds of risks with
// negatives, and one without. A gradient that is not requested has no rows.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "domain_regularization(Tensor regions, Tensor region_offsets, Tensor words, Tensor word_offsets, Tensor weights, "
      "Tensor biases, Tensor? negative_captions, Tensor? negative_images, float margin, str aggregation, "
      "bool for_weights) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "domain_regularization_backward(Tensor grad_adversarial, Tensor grad_regularization, Tensor regions, "
      "Tensor region_offsets, Tensor words, Tensor word_offsets, Tensor weights, Tensor biases, "
      "Tensor? negative_captions, Tensor? negative_images, Tensor risks, Tensor sums, float margin, str aggregation, "
      "bool for_regions, bool for_words, bool for_weights) -> (Tensor, Tensor, Tensor, Tensor)");
}
#endif
