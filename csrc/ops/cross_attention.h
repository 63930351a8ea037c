// Checks and options for every backend of cross_attention.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "itm_fast/cross_attention.h"

namespace itm_fast {

CrossAttentionOptions cross_attention_options(double temperature, const std::string& normalization,
                                              double negative_slope, const std::string& focal,
                                              const std::string& aggregation, double logsumexp_temperature);

// Refuses operands whose shapes, dtypes or devices do not match, and an unknown precision. Each backend decides which
// kernels it uses for a requested precision.
void check_operands(const torch::stable::Tensor& queries, const torch::stable::Tensor& query_offsets,
                    const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets,
                    const std::string& precision);

// The same checks for contexts only.
void check_contexts(const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets);

// Refuses prepared Gram matrices whose shape, dtype or device does not match the contexts. The code that reads them
// checks the number of values, which depends on the kernels.
void check_grams(const torch::stable::Tensor& grams, const torch::stable::Tensor& contexts);

// Refuses a gradient of the scores whose shape or device differs from theirs.
void check_score_gradient(const torch::stable::Tensor& grad_scores, const torch::stable::Tensor& query_offsets,
                          const torch::stable::Tensor& context_offsets);

}  // namespace itm_fast
