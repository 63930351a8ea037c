// The gradients of triplet_loss and hardest_negatives on CUDA: one launch each.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/loss_kernels.h"
#include "cuda/triplet_problem.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// See hardest_backward for the grid and for which block writes what.
template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) hardest_backward_kernel(const HardestBackward<T> parameters) {
  hardest_backward<T, Tile>(parameters);
}

template <typename T>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_loss, const TripletInputs& inputs, const Tensor& negatives,
                                    const TripletOptions& options) {
  TripletBackward<TripletProblem<T>> p{};
  p.problem = inputs.problem<T>();
  p.options = options;
  const int64_t rows = p.problem.rows, columns = p.problem.columns;
  const Tensor incoming = torch::stable::contiguous(grad_loss), chosen = torch::stable::contiguous(negatives);
  p.grad_loss = data_of<T>(incoming);
  p.negatives = options.mining == Mining::all ? nullptr : data_of<int64_t>(chosen);
  const int64_t separate = p.problem.has_diagonal() ? 0 : options.rows() ? rows : columns;
  Tensor grad_scores = torch::stable::new_empty(inputs.scores, {rows, columns});
  Tensor grad_positive = torch::stable::new_empty(inputs.scores, {separate});
  p.grad_scores = mutable_data_of<T>(grad_scores);
  p.grad_positive = mutable_data_of<T>(grad_positive);
  run_backward(p, inputs.scores);
  return {grad_scores, grad_positive};
}

template <typename T>
Tensor hardest_gradient(const Tensor& grad_rows, const Tensor& grad_columns, const Tensor& scores,
                        const Tensor& row_indices, const Tensor& column_indices) {
  const int64_t size = scores.size(0);
  const Tensor of_rows = torch::stable::contiguous(grad_rows), of_columns = torch::stable::contiguous(grad_columns);
  const Tensor rows = torch::stable::contiguous(row_indices), columns = torch::stable::contiguous(column_indices);
  Tensor grad_scores = torch::stable::new_empty(scores, {size, size});
  const HardestBackward<T> p{data_of<T>(of_rows),
                             data_of<T>(of_columns),
                             data_of<int64_t>(rows),
                             data_of<int64_t>(columns),
                             size,
                             mutable_data_of<T>(grad_scores)};
  const DeviceStream device(scores);
  with_tile(size, size, [&]<typename Tile>(Tile) {
    device.launch(hardest_backward_kernel<T, Tile>, blocks_of<Tile>(size, size), Tile::kThreads, p);
  });
  return grad_scores;
}

std::tuple<Tensor, Tensor> triplet_loss_backward(const Tensor& grad_loss, const Tensor& scores,
                                                 const std::optional<Tensor>& positives,
                                                 const std::optional<Tensor>& positive_scores, const Tensor& negatives,
                                                 double margin, const std::string& mining, double epsilon,
                                                 const std::string& selective_divisor, bool halve,
                                                 const std::string& directions, const std::string& reduction) {
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_triplet_scores(scores, positives, positive_scores, options.directions);
  check_triplet_gradient(grad_loss, scores, negatives, options);
  const TripletInputs inputs(scores, positives, positive_scores);
  const auto run = is_double(scores) ? backward<double> : backward<float>;
  return run(grad_loss, inputs, negatives, options);
}

Tensor hardest_negatives_backward(const Tensor& grad_rows, const Tensor& grad_columns, const Tensor& scores,
                                  const Tensor& row_indices, const Tensor& column_indices) {
  check_triplet_scores(scores, std::nullopt, std::nullopt, Directions::both);
  check_anchor_values("grad_rows", grad_rows, scores, scores.scalar_type());
  check_anchor_values("grad_columns", grad_columns, scores, scores.scalar_type());
  check_anchor_values("row_indices", row_indices, scores, ScalarType::Long);
  check_anchor_values("column_indices", column_indices, scores, ScalarType::Long);
  const auto run = is_double(scores) ? hardest_gradient<double> : hardest_gradient<float>;
  return run(grad_rows, grad_columns, scores, row_indices, column_indices);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("triplet_loss_backward", TORCH_BOX(&itm_fast::cuda::triplet_loss_backward));
  m.impl("hardest_negatives_backward", TORCH_BOX(&itm_fast::cuda::hardest_negatives_backward));
}
