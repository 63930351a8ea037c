// triplet_loss with its gradient on the CPU, in one pass over the scores if the loss allows it, and the operator that
// scales this gradient by the incoming one.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/matching_parts.h"
#include "cpu/triplet_gradient.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> with_gradient(const Tensor& scores, const std::optional<Tensor>& positives,
                                                         const std::optional<Tensor>& positive_scores,
                                                         const TripletOptions& options) {
  const Problem<T> problem(scores, positives, positive_scores);
  const T one(1);
  Tensor loss, negatives, grad_scores, grad_positive;
  if (options.mining == Mining::all) {
    // The gradient of an active hinge does not depend on the sums, so one pass computes both.
    ScanResult<T> sums;
    std::tie(grad_scores, grad_positive) = gradients_of<T>(problem, &one, nullptr, options, scores, &sums);
    std::tie(loss, negatives) = losses_of(problem, sums, options, scores);
  } else {
    // The negatives that receive a gradient are known only after the whole scan. Only anchors of "selective" that
    // average their hinges need a second pass over the scores.
    std::tie(loss, negatives) = losses_of(problem, scan_scores(problem, options), options, scores);
    const int64_t* chosen = static_cast<const int64_t*>(negatives.const_data_ptr());
    std::tie(grad_scores, grad_positive) = gradients_of<T>(problem, &one, chosen, options, scores);
  }
  return {loss, negatives, grad_scores, grad_positive};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> triplet_loss_with_gradient(
    const Tensor& scores, const std::optional<Tensor>& positives, const std::optional<Tensor>& positive_scores,
    double margin, const std::string& mining, double epsilon, const std::string& selective_divisor, bool halve,
    const std::string& directions, const std::string& reduction) {
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_triplet_scores(scores, positives, positive_scores, options.directions);
  check_reduced(options.reduction);
  const auto run = is_double(scores) ? with_gradient<double> : with_gradient<float>;
  return run(scores, positives, positive_scores, options);
}

namespace {

template <typename T>
void scale(Tensor& gradient, const Tensor& factor) {
  const T by = *static_cast<const T*>(factor.const_data_ptr());
  if (by == T(1)) return;
  T* values = static_cast<T*>(gradient.mutable_data_ptr());
  const auto& table = triplet_kernels(T());
  torch::stable::parallel_for(0, gradient.numel(), kElementsPerThread,
                              [&](int64_t first, int64_t last) { table.scale(values + first, last - first, by); });
}

void scale_gradient(Tensor gradient, const Tensor& factor) {
  check_gradient_scale(gradient, factor);
  is_double(gradient) ? scale<double>(gradient, factor) : scale<float>(gradient, factor);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("triplet_loss_with_gradient", TORCH_BOX(&itm_fast::triplet_loss_with_gradient));
  m.impl("scale_gradient", TORCH_BOX(&itm_fast::scale_gradient));
}
