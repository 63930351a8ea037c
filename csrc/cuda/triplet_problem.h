// Shared by the forward and the backward of triplet_loss on CUDA: dense inputs.
#pragma once

#include <optional>

#include "cuda/launch.h"
#include "itm_fast/cuda/triplet_launch.h"
#include "ops/triplet_loss.h"

namespace itm_fast::cuda {

inline void check_one_launch(int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(std::max(rows, columns) <= kOneLaunchUpTo, "scores: expected at most ", kOneLaunchUpTo,
                  " rows and columns for a gradient beside the loss, got (", rows, ", ", columns, ")");
}

struct TripletInputs {
  TripletInputs(const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& positives,
                const std::optional<torch::stable::Tensor>& positive_scores)
      : scores(torch::stable::contiguous(scores)) {
    if (positives) this->positives = torch::stable::contiguous(*positives);
    if (positive_scores) this->positive_scores = torch::stable::contiguous(*positive_scores);
  }

  template <typename T>
  TripletProblem<T> problem() const {
    return {data_of<T>(scores), data_of<bool>(positives), data_of<T>(positive_scores), scores.size(0), scores.size(1)};
  }

  torch::stable::Tensor scores;
  std::optional<torch::stable::Tensor> positives, positive_scores;
};

}  // namespace itm_fast::cuda
