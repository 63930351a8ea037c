// Checks and options for every backend of domain_regularization.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "itm_fast/domain_regularization.h"

namespace itm_fast {

// The operands as passed. Either both negatives are given, or neither.
struct DomainInputs {
  torch::stable::Tensor regions, region_offsets, words, word_offsets, weights, biases;
  std::optional<torch::stable::Tensor> negative_captions, negative_images;

  int64_t pairs() const { return weights.size(0); }
  int64_t dim() const { return weights.size(1); }
  int64_t kinds() const { return negative_captions ? kRiskKinds : 1; }
};

DomainOptions domain_options(double margin, const std::string& aggregation);

// Refuses operands whose shapes, dtypes or devices do not match.
void check_domain_inputs(const DomainInputs& inputs);

// Refuses gradients of the results, or risks and sums, that do not match these operands.
void check_domain_gradient(const torch::stable::Tensor& grad_adversarial,
                           const torch::stable::Tensor& grad_regularization, const DomainInputs& inputs,
                           const torch::stable::Tensor& risks, const torch::stable::Tensor& sums, bool for_weights);

}  // namespace itm_fast
