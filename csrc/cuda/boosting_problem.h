// Shared by the launchers of boosting_loss on CUDA: dense inputs.
#pragma once

#include <optional>

#include "cuda/launch.h"
#include "itm_fast/cuda/boosting_problem.h"
#include "ops/boosting_loss.h"

namespace itm_fast::cuda {

struct BoostingInputs {
  BoostingInputs(const torch::stable::Tensor& scores, const torch::stable::Tensor& anchor_scores,
                 const std::optional<torch::stable::Tensor>& positives)
      : scores(torch::stable::contiguous(scores)), anchor_scores(torch::stable::contiguous(anchor_scores)) {
    if (positives) this->positives = torch::stable::contiguous(*positives);
  }

  template <typename T>
  BoostingProblem<T> problem(const BoostingOptions& options) const {
    return boosting_problem(data_of<T>(scores), data_of<T>(anchor_scores), data_of<bool>(positives), scores.size(0),
                            options);
  }

  torch::stable::Tensor scores, anchor_scores;
  std::optional<torch::stable::Tensor> positives;
};

}  // namespace itm_fast::cuda
