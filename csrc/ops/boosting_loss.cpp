#include "ops/boosting_loss.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "ops/devices.h"
#include "ops/options.h"
#include "ops/triplet_loss.h"

namespace itm_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

BoostingOptions boosting_options(const std::string& strategy, const std::string& mining, double margin, double alpha,
                                 bool soft, const std::string& directions, const std::string& reduction) {
  using namespace std::string_view_literals;
  const TripletOptions shared = triplet_options(margin, mining, 0.0, "batch", false, directions, reduction);
  STD_TORCH_CHECK(shared.mining == Mining::all || shared.mining == Mining::hardest, "mining: unknown option '", mining,
                  "'");
  return {parse_option<Strategy>("strategy", strategy, std::array{"relative"sv, "absolute"sv, "both"sv}),
          shared.mining,
          margin,
          alpha,
          soft,
          shared.directions,
          shared.reduction};
}

void check_boosting_scores(const Tensor& scores, const Tensor& anchor_scores, const std::optional<Tensor>& positives) {
  check_triplet_scores(scores, positives, std::nullopt, Directions::both);
  STD_TORCH_CHECK(anchor_scores.scalar_type() == scores.scalar_type() && anchor_scores.dim() == 2 &&
                      anchor_scores.size(0) == scores.size(0) && anchor_scores.size(1) == scores.size(1),
                  "anchor_scores: expected the shape and the dtype of scores");
  check_same_device("anchor_scores", anchor_scores, "scores", scores);
}

void check_boosting_gradient(const Tensor& grad_loss, const Tensor& scores, const Tensor& negatives,
                             const BoostingOptions& options) {
  const int64_t anchors = scores.size(0);
  const int64_t losses = options.reduction == Reduction::none ? options.n_directions() * anchors : 1;
  STD_TORCH_CHECK(grad_loss.scalar_type() == scores.scalar_type() && grad_loss.numel() == losses,
                  "grad_loss: expected the shape of the loss and the dtype of scores");
  STD_TORCH_CHECK(negatives.scalar_type() == ScalarType::Long && negatives.dim() == 3 &&
                      negatives.size(0) == options.n_strategies() && negatives.size(1) == options.n_directions() &&
                      negatives.size(2) == (options.mining == Mining::all ? 0 : anchors),
                  "negatives: expected the second result of boosting_loss for the same scores and options");
  check_same_device("grad_loss", grad_loss, "scores", scores);
  check_same_device("negatives", negatives, "scores", scores);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// The second result of boosting_loss, int64 (strategies, directions, anchors), is the index of the negative that
// receives each anchor's gradient, -1 if there is none; (strategies, directions, 0) if mining is "all".
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "boosting_loss(Tensor scores, Tensor anchor_scores, Tensor? positives, str strategy, str mining, float margin, "
      "float alpha, bool soft, str directions, str reduction) -> (Tensor, Tensor)");
  m.def(
      "boosting_loss_backward(Tensor grad_loss, Tensor scores, Tensor anchor_scores, Tensor? positives, "
      "Tensor negatives, str strategy, str mining, float margin, float alpha, bool soft, str directions, "
      "str reduction) -> Tensor");
  m.def(
      "boosting_loss_with_gradient(Tensor scores, Tensor anchor_scores, Tensor? positives, str strategy, str mining, "
      "float margin, float alpha, bool soft, str directions, str reduction) -> (Tensor, Tensor, Tensor)");
}
#endif
