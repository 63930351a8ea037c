// triplet_loss and hardest_negatives on CUDA: one launch each.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/loss_kernels.h"
#include "cuda/triplet_problem.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> forward(const TripletInputs& inputs, const TripletOptions& options) {
  TripletForward<TripletProblem<T>> p{};
  p.problem = inputs.problem<T>();
  p.options = options;
  const int64_t anchors = options.rows() ? p.problem.rows : p.problem.columns;
  Tensor loss = new_loss(options.reduction, options.directions, anchors, inputs.scores);
  Tensor negatives = new_negatives(options.mining, options.directions, anchors, inputs.scores);
  run_forward(p, mutable_data_of<T>(loss), mutable_data_of<int64_t>(negatives), inputs.scores);
  return {loss, negatives};
}

template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> hardest(const TripletInputs& inputs) {
  TripletForward<TripletProblem<T>> p{};
  p.problem = inputs.problem<T>();
  p.options.mining = Mining::hardest;
  p.keeps_hardest = true;
  const int64_t size = p.problem.rows;
  Tensor row_values = torch::stable::new_empty(inputs.scores, {size});
  Tensor column_values = torch::stable::new_empty(inputs.scores, {size});
  Tensor row_indices = torch::stable::new_empty(inputs.scores, {size}, ScalarType::Long);
  Tensor column_indices = torch::stable::new_empty(inputs.scores, {size}, ScalarType::Long);
  p.rows = {mutable_data_of<T>(row_values), mutable_data_of<int64_t>(row_indices), size};
  p.columns = {mutable_data_of<T>(column_values), mutable_data_of<int64_t>(column_indices), size};
  run_forward(p, static_cast<T*>(nullptr), nullptr, inputs.scores);
  return {row_values, row_indices, column_values, column_indices};
}

std::tuple<Tensor, Tensor> triplet_loss(const Tensor& scores, const std::optional<Tensor>& positives,
                                        const std::optional<Tensor>& positive_scores, double margin,
                                        const std::string& mining, double epsilon, const std::string& selective_divisor,
                                        bool halve, const std::string& directions, const std::string& reduction) {
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_triplet_scores(scores, positives, positive_scores, options.directions);
  const TripletInputs inputs(scores, positives, positive_scores);
  return is_double(scores) ? forward<double>(inputs, options) : forward<float>(inputs, options);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hardest_negatives(const Tensor& scores,
                                                             const std::optional<Tensor>& positives) {
  check_triplet_scores(scores, positives, std::nullopt, Directions::both);
  const TripletInputs inputs(scores, positives, std::nullopt);
  return is_double(scores) ? hardest<double>(inputs) : hardest<float>(inputs);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("triplet_loss", TORCH_BOX(&itm_fast::cuda::triplet_loss));
  m.impl("hardest_negatives", TORCH_BOX(&itm_fast::cuda::hardest_negatives));
}
