// Checks and options for every backend of boosting_loss.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "itm_fast/boosting_loss.h"

namespace itm_fast {

BoostingOptions boosting_options(const std::string& strategy, const std::string& mining, double margin, double alpha,
                                 bool soft, const std::string& directions, const std::string& reduction);

// Both score matrices must be square and have the same shape and dtype, float32 or float64.
void check_boosting_scores(const torch::stable::Tensor& scores, const torch::stable::Tensor& anchor_scores,
                           const std::optional<torch::stable::Tensor>& positives);

void check_boosting_gradient(const torch::stable::Tensor& grad_loss, const torch::stable::Tensor& scores,
                             const torch::stable::Tensor& negatives, const BoostingOptions& options);

}  // namespace itm_fast
