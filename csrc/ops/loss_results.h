// The results of every backend of triplet_loss and boosting_loss.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <vector>

#include "itm_fast/triplet_loss.h"

namespace itm_fast {

constexpr int64_t n_directions(Directions directions) { return directions == Directions::both ? 2 : 1; }

// The first result: one number, or one per direction and anchor.
inline torch::stable::Tensor new_loss(Reduction reduction, Directions directions, int64_t anchors,
                                      const torch::stable::Tensor& scores) {
  std::vector<int64_t> shape;
  if (reduction == Reduction::none && directions == Directions::both) shape.push_back(2);
  if (reduction == Reduction::none) shape.push_back(anchors);
  return torch::stable::new_empty(scores, shape);
}

// The second result: which negative receives each anchor's gradient, (strategies, directions, anchors) for several
// strategies. It has no anchors if all negatives take part.
inline torch::stable::Tensor new_negatives(Mining mining, Directions directions, int64_t anchors,
                                           const torch::stable::Tensor& scores, std::vector<int64_t> shape = {}) {
  shape.push_back(n_directions(directions));
  shape.push_back(mining == Mining::all ? 0 : anchors);
  return torch::stable::new_empty(scores, shape, torch::headeronly::ScalarType::Long);
}

}  // namespace itm_fast
