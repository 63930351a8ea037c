// Checks and options that every backend of cross_attention shares.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

#include "itm_fast/cross_attention.h"

namespace itm_fast {

CrossAttentionOptions cross_attention_options(double temperature, const std::string& normalization,
                                              double negative_slope, const std::string& focal,
                                              const std::string& aggregation, double logsumexp_temperature);

void check_fragments(const char* name, const torch::stable::Tensor& values, const torch::stable::Tensor& offsets);

void check_same_width(const torch::stable::Tensor& queries, const torch::stable::Tensor& contexts);

}  // namespace itm_fast
