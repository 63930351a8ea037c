// Shared by the forward and the backward of the regulators on CUDA: the arguments of a call as dense tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/cross_attention_operands.h"
#include "cuda/launch.h"
#include "itm_fast/cuda/longest_sets.h"
#include "itm_fast/cuda/regulation_problem.h"
#include "ops/regulators.h"

namespace itm_fast::cuda {

// Weights in float32 that live as long as this object.
class Weights {
 public:
  template <typename S>
  void place(const RegulatorWeights& weights, RegulationProblem<S>& p) {
    int64_t count = 0;
    const auto add = [&](const LinearWeights& layer) {
      p.layers[count++] = {values(layer.weight), values(layer.bias), nullptr,
                           static_cast<int32_t>(layer.weight.size(0)), static_cast<int32_t>(layer.weight.size(1))};
    };
    for (const LinearWeights& step : weights.alignments) add(step);
    for (size_t i = 0; i < weights.correspondences.size(); ++i) {
      const CorrespondenceWeights& step = weights.correspondences[i];
      for (const LinearWeights* layer : {&step.w1, &step.w2, &step.w3}) add(*layer);
      p.shifts[i] = vector(step.w4);
    }
    for (size_t i = 0; i < weights.aggregations.size(); ++i) {
      const AggregationWeights& step = weights.aggregations[i];
      for (const LinearWeights* layer : {&step.a, &step.b}) add(*layer);
      p.attentiveness[i] = vector(step.v);
    }
    if (p.options.scored) p.score = vector(weights.score);
    if (p.options.learned_factors) {
      p.channels = values(weights.factors.weight);
      p.temperature = values(weights.factors.bias);
    }
  }

 private:
  const float* values(const torch::stable::Tensor& tensor) {
    kept_.push_back(torch::stable::contiguous(torch::stable::to(tensor, torch::headeronly::ScalarType::Float)));
    return data_of<float>(kept_.back());
  }
  VectorLayer vector(const LinearWeights& layer) { return {values(layer.weight), values(layer.bias)}; }

  std::vector<torch::stable::Tensor> kept_;
};

// The arguments of both operators.
struct Call {
  const torch::stable::Tensor &queries, &query_offsets, &contexts, &context_offsets;
  const RegulatorWeights& weights;
  const RegulatorOptions& options;
  const std::optional<torch::stable::Tensor>& seed;
  const std::string& precision;
  const LongestSets longest;
};

// The operands of a call, dense and in float32, with its weights and options. They live as long as this object.
template <typename S>
class RegulatorOperands {
 public:
  explicit RegulatorOperands(const Call& call)
      : queries_(torch::stable::to(call.queries, torch::headeronly::ScalarType::Float), call.query_offsets),
        contexts_(torch::stable::to(call.contexts, torch::headeronly::ScalarType::Float), call.context_offsets) {}

  void place(const Call& call, RegulationProblem<S>& p) {
    p.queries = queries_.rows();
    p.contexts = contexts_.rows();
    p.dim = call.queries.size(1);
    p.is_aligned = rows_are_aligned(p.contexts, p.contexts, p.dim);
    p.options = call.options;
    p.attention = PairOptions(call.options.attention);
    p.seed = call.options.dropout.probability > 0.0 ? data_of<int64_t>(call.seed) : nullptr;
    weights_.place(call.weights, p);
  }

 private:
  const Operand<float> queries_, contexts_;
  Weights weights_;
};

inline void check_call(const Call& call) {
  const RegulatorOptions& options = call.options;
  for (const int64_t steps : {options.n_alignments, options.n_correspondences, options.n_aggregations}) {
    STD_TORCH_CHECK(steps <= kMostSteps, "steps: the CUDA kernels take at most ", kMostSteps, ", got ", steps);
  }
  STD_TORCH_CHECK(call.queries.scalar_type() != torch::headeronly::ScalarType::Double,
                  "queries: no CUDA kernel computes the regulators in float64");
}

}  // namespace itm_fast::cuda
