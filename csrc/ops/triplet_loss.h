// Checks and options for every backend of triplet_loss.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "itm_fast/triplet_loss.h"

namespace itm_fast {

TripletOptions triplet_options(double margin, const std::string& mining, double epsilon,
                               const std::string& selective_divisor, bool halve, const std::string& directions,
                               const std::string& reduction);

inline bool is_double(const torch::stable::Tensor& scores) {
  return scores.scalar_type() == torch::headeronly::ScalarType::Double;
}

// Scores must be float32 or float64; without positive scores they must be square.
void check_triplet_scores(const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& positives,
                          const std::optional<torch::stable::Tensor>& positive_scores, Directions directions);

void check_triplet_gradient(const torch::stable::Tensor& grad_loss, const torch::stable::Tensor& scores,
                            const torch::stable::Tensor& negatives, const TripletOptions& options);

// For operators that return the gradient with the loss: the loss must be a single value.
void check_reduced(Reduction reduction);

void check_gradient_scale(const torch::stable::Tensor& gradient, const torch::stable::Tensor& factor);

// Checks one value per anchor of a square score matrix.
void check_anchor_values(const char* name, const torch::stable::Tensor& values, const torch::stable::Tensor& scores,
                         torch::headeronly::ScalarType dtype);

}  // namespace itm_fast
