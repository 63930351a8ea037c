// Checks and options that every backend of cross_attention shares.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "itm_fast/cross_attention.h"

namespace itm_fast {

CrossAttentionOptions cross_attention_options(double temperature, const std::string& normalization,
                                              double negative_slope, const std::string& focal,
                                              const std::string& aggregation, double logsumexp_temperature);

// Refuses operands whose shapes, dtypes or devices do not go together, and an unknown precision. Which of the
// precisions that are asked for a backend has kernels of is its own business.
void check_operands(const torch::stable::Tensor& queries, const torch::stable::Tensor& query_offsets,
                    const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets,
                    const std::string& precision);

// The same of contexts alone.
void check_contexts(const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets);

// Refuses prepared Gram matrices of another shape, dtype or device than those of the contexts. How many values there
// are is checked where they are read: that depends on the kernels.
void check_grams(const torch::stable::Tensor& grams, const torch::stable::Tensor& contexts);

// Refuses a gradient of the scores that has another shape or device than they have.
void check_score_gradient(const torch::stable::Tensor& grad_scores, const torch::stable::Tensor& query_offsets,
                          const torch::stable::Tensor& context_offsets);

}  // namespace itm_fast
