// Checks, options and weights that every backend of the regulators shares.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "itm_fast/regulators.h"

namespace itm_fast {

// What says how the weights of a call act together, as it comes in.
struct RegulatorSetting {
  int64_t alignments, correspondences, aggregations;
  bool scored, learned_factors;
  std::string activation;
  bool normalize_mean;
  std::string schedule;
  bool residual_correspondence, residual_aggregation;
  std::string correspondence_input;
};

// Refuses unknown options and numbers of steps that do not fit each other.
RegulatorOptions regulator_options(const RegulatorSetting& setting, const CrossAttentionOptions& attention);

// Refuses a probability outside of [0, 1), and one without a seed. The key is left to the backend: the seed lies on its
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

// The weights by name; score and factors are those of a call that has them.
struct RegulatorWeights {
  std::vector<LinearWeights> alignments;
  std::vector<CorrespondenceWeights> correspondences;
  std::vector<AggregationWeights> aggregations;
  LinearWeights score, factors;
  int64_t width = 0, hidden = 0;  // of the alignments, and of the widest hidden layer
};

// Takes the weights in the order of `RegulatorParameters.tensors()`, and refuses other numbers, shapes, dtypes and
// devices than fit each other and the queries.
RegulatorWeights regulator_weights(const std::vector<torch::stable::Tensor>& weights, const RegulatorOptions& options,
                                   const torch::stable::Tensor& queries);

}  // namespace itm_fast
