// triplet_loss with its gradient on CUDA in one launch, and the operator that scales this gradient by the incoming one.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/loss_kernels.h"
#include "cuda/triplet_problem.h"

namespace itm_fast::cuda {
namespace {

using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> with_gradient(const TripletInputs& inputs, const TripletOptions& options) {
  TripletWithGradient<TripletProblem<T>> p{};
  p.forward.problem = inputs.problem<T>();
  p.forward.options = options;
  const int64_t rows = inputs.scores.size(0), columns = inputs.scores.size(1);
  const int64_t anchors = options.rows() ? rows : columns;
  const int64_t separate = inputs.positive_scores ? anchors : 0;
  Tensor loss = new_loss(options.reduction, options.directions, anchors, inputs.scores);
  Tensor negatives = new_negatives(options.mining, options.directions, anchors, inputs.scores);
  Tensor grad_scores = torch::stable::new_empty(inputs.scores, {rows, columns});
  Tensor grad_positive = torch::stable::new_empty(inputs.scores, {separate});
  p.backward.grad_scores = mutable_data_of<T>(grad_scores);
  p.backward.grad_positive = mutable_data_of<T>(grad_positive);
  run_with_gradient(p, mutable_data_of<T>(loss), mutable_data_of<int64_t>(negatives), inputs.scores);
  return {loss, negatives, grad_scores, grad_positive};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> triplet_loss_with_gradient(
    const Tensor& scores, const std::optional<Tensor>& positives, const std::optional<Tensor>& positive_scores,
    double margin, const std::string& mining, double epsilon, const std::string& selective_divisor, bool halve,
    const std::string& directions, const std::string& reduction) {
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_triplet_scores(scores, positives, positive_scores, options.directions);
  check_reduced(options.reduction);
  const TripletInputs inputs(scores, positives, positive_scores);
  return is_double(scores) ? with_gradient<double>(inputs, options) : with_gradient<float>(inputs, options);
}

constexpr int kScaleThreads = 256;
constexpr int64_t kScaleBlocks = 2048;  // Enough to fill a GPU; blocks without work end at once.

template <typename T>
__global__ void __launch_bounds__(kScaleThreads) scale_gradient_kernel(const GradientScale<T> parameters) {
  scale_gradient(parameters);
}

template <typename T>
void scale(Tensor& gradient, const Tensor& factor) {
  const GradientScale<T> p{mutable_data_of<T>(gradient), gradient.numel(), data_of<T>(factor)};
  if (p.size == 0) return;
  const int64_t blocks = (p.size + kScaleThreads - 1) / kScaleThreads;
  DeviceStream(gradient).launch(scale_gradient_kernel<T>, std::min(blocks, kScaleBlocks), kScaleThreads, p);
}

void multiply_gradient(Tensor gradient, const Tensor& factor) {
  check_gradient_scale(gradient, factor);
  is_double(gradient) ? scale<double>(gradient, factor) : scale<float>(gradient, factor);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("triplet_loss_with_gradient", TORCH_BOX(&itm_fast::cuda::triplet_loss_with_gradient));
  m.impl("scale_gradient", TORCH_BOX(&itm_fast::cuda::multiply_gradient));
}
