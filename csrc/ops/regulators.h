// Checks, options and weights for every backend of the regulators.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "itm_fast/regulators.h"

namespace itm_fast {

// How the weights of a call are combined, as passed.
struct RegulatorSetting {
  int64_t alignments, correspondences, aggregations;
  bool scored, learned_factors;
  std::string activation;
  bool normalize_mean, normalize_attended, normalize_guidance;
  std::string schedule;
  bool residual_correspondence, residual_aggregation;
  std::string correspondence_input;
};

// Refuses unknown options and inconsistent numbers of steps.
RegulatorOptions regulator_options(const RegulatorSetting& setting, const CrossAttentionOptions& attention);

// The options of a chain that ends in alignments.
RegulatorOptions alignment_options(int64_t correspondences, bool residual, const CrossAttentionOptions& attention);

// Refuses a probability outside of [0, 1), or one without a seed. The backend reads the key, because the seed is on its
// device.
CounterDropout counter_dropout(double probability, const std::optional<torch::stable::Tensor>& seed,
                               const torch::stable::Tensor& queries);

struct LinearWeights {
  torch::stable::Tensor weight, bias;
};

struct CorrespondenceWeights {
  LinearWeights w1, w2, w3, w4;
};

struct AggregationWeights {
  LinearWeights a, b, v;
};

// The weights by name; score and factors only exist for calls that have them.
struct RegulatorWeights {
  std::vector<LinearWeights> alignments;
  std::vector<CorrespondenceWeights> correspondences;
  std::vector<AggregationWeights> aggregations;
  LinearWeights score, factors;
  int64_t width = 0, hidden = 0;  // of the alignments, and of the widest hidden layer
};

// Takes the weights in the order of `RegulatorParameters.tensors()`. Refuses a number of weights, or shapes, dtypes and
// devices, that do not match each other and the queries.
RegulatorWeights regulator_weights(const std::vector<torch::stable::Tensor>& weights, const RegulatorOptions& options,
                                   const torch::stable::Tensor& queries);

// Refuses a gradient of the alignments that does not have their shape or is on another device.
void check_alignment_gradient(const torch::stable::Tensor& grad_alignments, const torch::stable::Tensor& queries,
                              const torch::stable::Tensor& context_offsets, const RegulatorWeights& weights);

}  // namespace itm_fast
