// boosting_loss and its gradient on CUDA, with the kernels of triplet_loss: one launch each, or one for both.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/boosting_problem.h"
#include "cuda/loss_kernels.h"
#include "ops/triplet_loss.h"

namespace itm_fast::cuda {
namespace {

using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> forward(const BoostingInputs& inputs, const BoostingOptions& options) {
  TripletForward<BoostingProblem<T>> p{};
  p.problem = inputs.problem<T>(options);
  p.options = shared_options(options);
  Tensor loss = new_loss(options.reduction, options.directions, p.problem.rows, inputs.scores);
  Tensor negatives =
      new_negatives(options.mining, options.directions, p.problem.rows, inputs.scores, {options.n_strategies()});
  run_forward(p, mutable_data_of<T>(loss), mutable_data_of<int64_t>(negatives), inputs.scores);
  return {loss, negatives};
}

template <typename T>
Tensor backward(const Tensor& grad_loss, const BoostingInputs& inputs, const Tensor& negatives,
                const BoostingOptions& options) {
  TripletBackward<BoostingProblem<T>> p{};
  p.problem = inputs.problem<T>(options);
  p.options = shared_options(options);
  const Tensor incoming = torch::stable::contiguous(grad_loss), chosen = torch::stable::contiguous(negatives);
  p.grad_loss = data_of<T>(incoming);
  p.negatives = options.mining == Mining::all ? nullptr : data_of<int64_t>(chosen);
  const int64_t size = inputs.scores.size(0);
  Tensor grad_scores = torch::stable::new_empty(inputs.scores, {size, size});
  p.grad_scores = mutable_data_of<T>(grad_scores);
  run_backward(p, inputs.scores);
  return grad_scores;
}

template <typename T>
std::tuple<Tensor, Tensor, Tensor> with_gradient(const BoostingInputs& inputs, const BoostingOptions& options) {
  TripletWithGradient<BoostingProblem<T>> p{};
  p.forward.problem = inputs.problem<T>(options);
  p.forward.options = shared_options(options);
  const int64_t anchors = inputs.scores.size(0);
  Tensor loss = new_loss(options.reduction, options.directions, anchors, inputs.scores);
  Tensor negatives =
      new_negatives(options.mining, options.directions, anchors, inputs.scores, {options.n_strategies()});
  Tensor grad_scores = torch::stable::new_empty(inputs.scores, {anchors, anchors});
  p.backward.grad_scores = mutable_data_of<T>(grad_scores);
  run_with_gradient(p, mutable_data_of<T>(loss), mutable_data_of<int64_t>(negatives), inputs.scores);
  return {loss, negatives, grad_scores};
}

std::tuple<Tensor, Tensor> boosting_loss(const Tensor& scores, const Tensor& anchor_scores,
                                         const std::optional<Tensor>& positives, const std::string& strategy,
                                         const std::string& mining, double margin, double alpha, bool soft,
                                         const std::string& directions, const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  const BoostingInputs inputs(scores, anchor_scores, positives);
  return is_double(scores) ? forward<double>(inputs, options) : forward<float>(inputs, options);
}

Tensor boosting_loss_backward(const Tensor& grad_loss, const Tensor& scores, const Tensor& anchor_scores,
                              const std::optional<Tensor>& positives, const Tensor& negatives,
                              const std::string& strategy, const std::string& mining, double margin, double alpha,
                              bool soft, const std::string& directions, const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  check_boosting_gradient(grad_loss, scores, negatives, options);
  const BoostingInputs inputs(scores, anchor_scores, positives);
  const auto run = is_double(scores) ? backward<double> : backward<float>;
  return run(grad_loss, inputs, negatives, options);
}

std::tuple<Tensor, Tensor, Tensor> boosting_loss_with_gradient(const Tensor& scores, const Tensor& anchor_scores,
                                                               const std::optional<Tensor>& positives,
                                                               const std::string& strategy, const std::string& mining,
                                                               double margin, double alpha, bool soft,
                                                               const std::string& directions,
                                                               const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  check_reduced(options.reduction);
  const BoostingInputs inputs(scores, anchor_scores, positives);
  return is_double(scores) ? with_gradient<double>(inputs, options) : with_gradient<float>(inputs, options);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("boosting_loss", TORCH_BOX(&itm_fast::cuda::boosting_loss));
  m.impl("boosting_loss_backward", TORCH_BOX(&itm_fast::cuda::boosting_loss_backward));
  m.impl("boosting_loss_with_gradient", TORCH_BOX(&itm_fast::cuda::boosting_loss_with_gradient));
}
