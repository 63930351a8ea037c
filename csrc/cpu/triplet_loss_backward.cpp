// The gradients of triplet_loss and hardest_negatives on the CPU, for any incoming gradient.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/triplet_gradient.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_loss, const Tensor& scores,
                                    const std::optional<Tensor>& positives,
                                    const std::optional<Tensor>& positive_scores, const Tensor& negatives,
                                    const TripletOptions& options) {
  const Problem<T> problem(scores, positives, positive_scores);
  const Tensor incoming = torch::stable::contiguous(grad_loss), chosen = torch::stable::contiguous(negatives);
  return gradients_of(problem, static_cast<const T*>(incoming.const_data_ptr()),
                      static_cast<const int64_t*>(chosen.const_data_ptr()), options, scores);
}

template <typename T>
Tensor hardest_backward(const Tensor& grad_rows, const Tensor& grad_columns, const Tensor& scores,
                        const Tensor& row_indices, const Tensor& column_indices) {
  const int64_t rows = scores.size(0), columns = scores.size(1);
  Tensor grad_scores = torch::stable::new_zeros(scores, {rows, columns});
  T* out = static_cast<T*>(grad_scores.mutable_data_ptr());
  const auto add = [&](const Tensor& gradient, const Tensor& indices, int64_t anchors, int64_t candidates,
                       int64_t anchor_step, int64_t candidate_step) {
    const Tensor values = torch::stable::contiguous(gradient), chosen = torch::stable::contiguous(indices);
    const T* value = static_cast<const T*>(values.const_data_ptr());
    const int64_t* index = static_cast<const int64_t*>(chosen.const_data_ptr());
    for (int64_t i = 0; i < anchors; ++i) {
      if (index[i] >= 0 && index[i] < candidates) out[i * anchor_step + index[i] * candidate_step] += value[i];
    }
  };
  add(grad_rows, row_indices, rows, columns, columns, 1);
  add(grad_columns, column_indices, columns, rows, 1, columns);
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
  const auto run = is_double(scores) ? backward<double> : backward<float>;
  return run(grad_loss, scores, positives, positive_scores, negatives, options);
}

Tensor hardest_negatives_backward(const Tensor& grad_rows, const Tensor& grad_columns, const Tensor& scores,
                                  const Tensor& row_indices, const Tensor& column_indices) {
  check_triplet_scores(scores, std::nullopt, std::nullopt, Directions::both);
  check_anchor_values("grad_rows", grad_rows, scores, scores.scalar_type());
  check_anchor_values("grad_columns", grad_columns, scores, scores.scalar_type());
  check_anchor_values("row_indices", row_indices, scores, ScalarType::Long);
  check_anchor_values("column_indices", column_indices, scores, ScalarType::Long);
  const auto run = is_double(scores) ? hardest_backward<double> : hardest_backward<float>;
  return run(grad_rows, grad_columns, scores, row_indices, column_indices);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("triplet_loss_backward", TORCH_BOX(&itm_fast::triplet_loss_backward));
  m.impl("hardest_negatives_backward", TORCH_BOX(&itm_fast::hardest_negatives_backward));
}
