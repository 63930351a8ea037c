// Checks and options for every backend of maxsim_scores.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "itm_fast/maxsim.h"

namespace itm_fast {

MaxsimOptions maxsim_options(const std::string& reduction, const std::string& direction);

// Refuses pairs that are not int64 of shape (P, 2) on the device of the queries.
void check_pairs(const std::optional<torch::stable::Tensor>& pairs, const torch::stable::Tensor& queries);

// Refuses an incoming gradient that is not one number per pair on the device of the queries.
void check_maxsim_gradient(const torch::stable::Tensor& grad_scores, const torch::stable::Tensor& queries,
                           const torch::stable::Tensor& query_offsets, const torch::stable::Tensor& context_offsets,
                           const std::optional<torch::stable::Tensor>& pairs);

}  // namespace itm_fast
