// boosting_loss on the CPU: the scan and the gradient of triplet losses over gaps, and the positive terms.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cpu/boosting_problem.h"
#include "cpu/huge_pages.h"
#include "cpu/triplet_gradient.h"
#include "cpu/triplet_scan.h"
#include "ops/boosting_loss.h"
#include "ops/loss_results.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> forward(const Tensor& scores, const Tensor& anchor_scores,
                                   const std::optional<Tensor>& positives, const BoostingOptions& options) {
  const BoostingProblem<T> boosting(scores, anchor_scores, positives, options);
  const int64_t anchors = boosting.anchors;
  const bool keep_each = options.reduction == Reduction::none;
  const int64_t kept = options.mining == Mining::all ? 0 : anchors;
  Tensor loss = new_loss(options.reduction, options.directions, anchors, scores);
  Tensor negatives = new_negatives(options.mining, options.directions, anchors, scores, {options.n_strategies()});
  T* loss_out = static_cast<T*>(loss.mutable_data_ptr());
  int64_t* negatives_out = static_cast<int64_t*>(negatives.mutable_data_ptr());

  std::vector<double> losses(options.n_directions() * anchors, 0.0);
  ScanResult<T> found;
  for (const auto& view : boosting.views) {
    // With fixed margins both strategies have the same hardest negatives.
    const bool same = &view != &boosting.views.front() && options.mining == Mining::hardest && !options.soft;
    if (!same) found = scan_scores(view.problem, view.options);
    for (const bool is_rows : {true, false}) {
      if (!(is_rows ? view.options.rows() : view.options.columns())) continue;
      const Direction<T> direction{view.problem, is_rows};
      const int64_t at = boosting.position(is_rows) * anchors;
      const int64_t chosen = view.strategy * options.n_directions() * kept + boosting.position(is_rows) * kept;
      const std::vector<int64_t> counts = boosting.positive_counts(view, is_rows);
      for (int64_t i = 0; i < anchors; ++i) {
        const AnchorLoss<T> anchor = loss_of(direction, is_rows ? found.rows : found.columns, i, view.options);
        losses[at + i] += anchor.value;
        if (view.part.absolute) losses[at + i] += counted_term(boosting.positive_term(view, i), counts[i]);
        if (kept > 0) negatives_out[chosen + i] = anchor.negative;
      }
    }
  }
  const double scale = options.strategy == Strategy::both ? 0.5 : 1.0;
  double total = 0.0;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (keep_each) loss_out[i] = static_cast<T>(scale * losses[i]);
    total += losses[i];
  }
  if (options.reduction == Reduction::mean) total /= static_cast<double>(std::max<int64_t>(anchors, 1));
  if (!keep_each) *loss_out = static_cast<T>(scale * total);
  return {loss, negatives};
}

template <typename T>
Tensor backward(const Tensor& grad_loss, const Tensor& scores, const Tensor& anchor_scores,
                const std::optional<Tensor>& positives, const Tensor& negatives, const BoostingOptions& options) {
  const BoostingProblem<T> boosting(scores, anchor_scores, positives, options);
  const int64_t anchors = boosting.anchors;
  const bool each = options.reduction == Reduction::none;
  const Tensor incoming = torch::stable::contiguous(grad_loss), chosen = torch::stable::contiguous(negatives);
  Tensor grad_scores = torch::stable::new_empty(scores, {anchors, anchors});
  T* out = static_cast<T*>(grad_scores.mutable_data_ptr());
  prefer_huge_pages(out, anchors * anchors * static_cast<int64_t>(sizeof(T)));

  std::vector<T> diagonal(anchors, T(0));
  for (const auto& view : boosting.views) {
    const bool begins_with_rows = view.options.rows();
    const int64_t first = boosting.position(begins_with_rows) * anchors;
    const T* weights = static_cast<const T*>(incoming.const_data_ptr()) + (each ? first : 0);
    const int64_t* indices = static_cast<const int64_t*>(chosen.const_data_ptr());
    if (options.mining == Mining::hardest) indices += view.strategy * options.n_directions() * anchors + first;
    const bool accumulates = &view != &boosting.views.front();
    const std::vector<T> of_positives =
        Gradient<T>(view.problem, weights, indices, view.options, out, accumulates).compute();
    for (int64_t i = 0; i < anchors && !view.part.absolute; ++i) diagonal[i] += of_positives[i];
    for (const bool is_rows : {true, false}) {
      if (!view.part.absolute || !(is_rows ? view.options.rows() : view.options.columns())) continue;
      const std::vector<int64_t> counts = boosting.positive_counts(view, is_rows);
      const T* of_direction = weights + (each && is_rows != begins_with_rows ? anchors : 0);
      for (int64_t i = 0; i < anchors; ++i) {
        if (counts[i] == 0 || boosting.positive_term(view, i) == T(0)) continue;
        diagonal[i] -= weight_of(view.options, of_direction, i, anchors) * static_cast<T>(counts[i]);
      }
    }
  }
  for (int64_t i = 0; i < anchors; ++i) out[i * anchors + i] = diagonal[i];
  return grad_scores;
}

std::tuple<Tensor, Tensor> boosting_loss(const Tensor& scores, const Tensor& anchor_scores,
                                         const std::optional<Tensor>& positives, const std::string& strategy,
                                         const std::string& mining, double margin, double alpha, bool soft,
                                         const std::string& directions, const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  const auto run = is_double(scores) ? forward<double> : forward<float>;
  return run(scores, anchor_scores, positives, options);
}

Tensor boosting_loss_backward(const Tensor& grad_loss, const Tensor& scores, const Tensor& anchor_scores,
                              const std::optional<Tensor>& positives, const Tensor& negatives,
                              const std::string& strategy, const std::string& mining, double margin, double alpha,
                              bool soft, const std::string& directions, const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  check_boosting_gradient(grad_loss, scores, negatives, options);
  const auto run = is_double(scores) ? backward<double> : backward<float>;
  return run(grad_loss, scores, anchor_scores, positives, negatives, options);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("boosting_loss", TORCH_BOX(&itm_fast::boosting_loss));
  m.impl("boosting_loss_backward", TORCH_BOX(&itm_fast::boosting_loss_backward));
}
