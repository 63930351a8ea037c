#include "ops/triplet_loss.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "ops/devices.h"
#include "ops/loss_results.h"
#include "ops/options.h"

namespace itm_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

TripletOptions triplet_options(double margin, const std::string& mining, double epsilon,
                               const std::string& selective_divisor, bool halve, const std::string& directions,
                               const std::string& reduction) {
  using namespace std::string_view_literals;
  TripletOptions options;
  options.margin = margin;
  options.epsilon = epsilon;
  options.mining = parse_option<Mining>(
      "mining", mining, std::array{"all"sv, "hardest"sv, "selective"sv, "semi_hard"sv, "contrastive"sv});
  options.selective_divisor =
      parse_option<SelectiveDivisor>("selective_divisor", selective_divisor, std::array{"batch"sv, "negatives"sv});
  options.halve = halve;
  options.directions = parse_option<Directions>("directions", directions, std::array{"both"sv, "rows"sv, "columns"sv});
  options.reduction = parse_option<Reduction>("reduction", reduction, std::array{"sum"sv, "mean"sv, "none"sv});
  return options;
}

void check_triplet_scores(const Tensor& scores, const std::optional<Tensor>& positives,
                          const std::optional<Tensor>& positive_scores, Directions directions) {
  STD_TORCH_CHECK(scores.dim() == 2, "scores: expected shape (n, m), got ", scores.dim(), " dimensions");
  STD_TORCH_CHECK(scores.scalar_type() == ScalarType::Float || scores.scalar_type() == ScalarType::Double,
                  "scores: expected float32 or float64");
  const int64_t rows = scores.size(0), columns = scores.size(1);
  if (positives) {
    STD_TORCH_CHECK(positives->scalar_type() == ScalarType::Bool && positives->dim() == 2 &&
                        positives->size(0) == rows && positives->size(1) == columns,
                    "positives: expected a bool tensor of the shape of scores");
    check_same_device("positives", *positives, "scores", scores);
  }
  if (positive_scores) {
    const int64_t anchors = directions == Directions::rows ? rows : columns;
    STD_TORCH_CHECK(directions != Directions::both && positive_scores->scalar_type() == scores.scalar_type() &&
                        positive_scores->dim() == 1 && positive_scores->size(0) == anchors,
                    "positive_scores: expected one score per anchor of one direction, in the dtype of scores");
    check_same_device("positive_scores", *positive_scores, "scores", scores);
  } else {
    STD_TORCH_CHECK(rows == columns, "scores: expected a square matrix, got (", rows, ", ", columns, ")");
  }
}

void check_triplet_gradient(const Tensor& grad_loss, const Tensor& scores, const Tensor& negatives,
                            const TripletOptions& options) {
  const int64_t directions = n_directions(options.directions), anchors = scores.size(options.rows() ? 0 : 1);
  const int64_t losses = options.reduction == Reduction::none ? directions * anchors : 1;
  STD_TORCH_CHECK(grad_loss.scalar_type() == scores.scalar_type() && grad_loss.numel() == losses,
                  "grad_loss: expected the shape of the loss and the dtype of scores");
  STD_TORCH_CHECK(negatives.scalar_type() == ScalarType::Long && negatives.dim() == 2 &&
                      negatives.size(0) == directions &&
                      negatives.size(1) == (options.mining == Mining::all ? 0 : anchors),
                  "negatives: expected the second result of triplet_loss for the same scores and options");
  check_same_device("grad_loss", grad_loss, "scores", scores);
  check_same_device("negatives", negatives, "scores", scores);
}

void check_reduced(Reduction reduction) {
  STD_TORCH_CHECK(reduction != Reduction::none, "reduction: a gradient beside the loss needs 'sum' or 'mean'");
}

void check_gradient_scale(const Tensor& gradient, const Tensor& factor) {
  STD_TORCH_CHECK((gradient.scalar_type() == ScalarType::Float || gradient.scalar_type() == ScalarType::Double) &&
                      gradient.is_contiguous(),
                  "gradient: expected a dense float32 or float64 tensor");
  STD_TORCH_CHECK(factor.scalar_type() == gradient.scalar_type() && factor.numel() == 1,
                  "factor: expected one element in the dtype of gradient");
  check_same_device("factor", factor, "gradient", gradient);
}

void check_anchor_values(const char* name, const Tensor& values, const Tensor& scores, ScalarType dtype) {
  STD_TORCH_CHECK(values.scalar_type() == dtype && values.dim() == 1 && values.size(0) == scores.size(0), name,
                  ": expected one value per anchor");
  check_same_device(name, values, "scores", scores);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// The second result of triplet_loss, int64 (directions, anchors), says which negative receives each anchor's gradient:
// its index, -1 for none, -2 for all; (directions, 0) if mining is "all". The second result of the backward is empty
// without positive scores. triplet_loss_with_gradient returns the results of both for an incoming gradient of 1.
// scale_gradient multiplies such a gradient by the incoming one and keeps elements that are 0.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "triplet_loss(Tensor scores, Tensor? positives, Tensor? positive_scores, float margin, str mining, "
      "float epsilon, str selective_divisor, bool halve, str directions, str reduction) -> (Tensor, Tensor)");
  m.def(
      "triplet_loss_backward(Tensor grad_loss, Tensor scores, Tensor? positives, Tensor? positive_scores, "
      "Tensor negatives, float margin, str mining, float epsilon, str selective_divisor, bool halve, "
      "str directions, str reduction) -> (Tensor, Tensor)");
  m.def(
      "triplet_loss_with_gradient(Tensor scores, Tensor? positives, Tensor? positive_scores, float margin, str mining, "
      "float epsilon, str selective_divisor, bool halve, str directions, str reduction) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("scale_gradient(Tensor(a!) gradient, Tensor factor) -> ()");
  m.def("hardest_negatives(Tensor scores, Tensor? positives) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "hardest_negatives_backward(Tensor grad_rows, Tensor grad_columns, Tensor scores, Tensor row_indices, "
      "Tensor column_indices) -> Tensor");
}
#endif
