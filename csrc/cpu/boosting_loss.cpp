// CPU kernels of boosting_loss: scan and gradient of triplet losses over gaps, and the positive terms.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cpu/boosting_problem.h"
#include "cpu/matching_parts.h"
#include "cpu/triplet_gradient.h"
#include "ops/boosting_loss.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Whether a view has the same hardest negatives as the one before it: with fixed margins all strategies share them.
template <typename T>
bool has_the_same(const BoostingProblem<T>& boosting, const typename BoostingProblem<T>::View& view) {
  return &view != &boosting.views.front() && boosting.options.mining == Mining::hardest && !boosting.options.soft;
}

// Offset of a view's results among those of all strategies and directions.
template <typename T>
int64_t first_negative(const BoostingProblem<T>& boosting, const typename BoostingProblem<T>::View& view,
                       bool is_rows) {
  if (boosting.options.mining == Mining::all) return 0;
  return (view.strategy * boosting.options.n_directions() + boosting.position(is_rows)) * boosting.anchors;
}

// The losses of all directions and anchors, summed over strategies, and the negatives that receive their gradients.
template <typename T>
class BoostingLosses {
 public:
  BoostingLosses(const BoostingProblem<T>& boosting, const Tensor& scores)
      : boosting_(boosting),
        loss_(new_loss(boosting.options.reduction, boosting.options.directions, boosting.anchors, scores)),
        negatives_(new_negatives(boosting.options.mining, boosting.options.directions, boosting.anchors, scores,
                                 {boosting.options.n_strategies()})),
        sums_(boosting.options.n_directions() * boosting.anchors, 0.0) {}

  void add(const typename BoostingProblem<T>::View& view, const ScanResult<T>& found) {
    int64_t* chosen = static_cast<int64_t*>(negatives_.mutable_data_ptr());
    for (const bool is_rows : {true, false}) {
      if (!(is_rows ? view.options.rows() : view.options.columns())) continue;
      const Direction<T> direction{view.problem, is_rows};
      const int64_t at = boosting_.position(is_rows) * boosting_.anchors;
      const int64_t first = first_negative(boosting_, view, is_rows);
      const std::vector<int64_t>& counts = boosting_.positive_counts(is_rows);
      for (int64_t i = 0; i < boosting_.anchors; ++i) {
        const AnchorLoss<T> anchor = loss_of(direction, is_rows ? found.rows : found.columns, i, view.options);
        sums_[at + i] += anchor.value;
        if (view.part.absolute) sums_[at + i] += counted_term(boosting_.positive_term(view, i), counts[i]);
        if (boosting_.options.mining != Mining::all) chosen[first + i] = anchor.negative;
      }
    }
  }

  const Tensor& negatives() const { return negatives_; }

  Tensor loss() {
    T* out = static_cast<T*>(loss_.mutable_data_ptr());
    const bool keep_each = boosting_.options.reduction == Reduction::none;
    const double scale = boosting_.options.strategy == Strategy::both ? 0.5 : 1.0;
    double total = 0.0;
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (keep_each) out[i] = static_cast<T>(scale * sums_[i]);
      total += sums_[i];
    }
    if (boosting_.options.reduction == Reduction::mean) {
      total /= static_cast<double>(std::max<int64_t>(boosting_.anchors, 1));
    }
    if (!keep_each) *out = static_cast<T>(scale * total);
    return loss_;
  }

 private:
  const BoostingProblem<T>& boosting_;
  Tensor loss_, negatives_;
  std::vector<double> sums_;
};

// Computes the gradient of the scores, view by view.
template <typename T>
class BoostingGradient {
 public:
  // `incoming` is one value, or one per direction and anchor for Reduction::none.
  BoostingGradient(const BoostingProblem<T>& boosting, const Tensor& scores, const T* incoming)
      : boosting_(boosting),
        incoming_(incoming),
        gradient_(new_gradient<T>(scores)),
        diagonal_(boosting.anchors, T(0)) {}

  // `negatives` holds the negatives of all views; `sums` as in `Gradient`.
  void add(const typename BoostingProblem<T>::View& view, const int64_t* negatives, ScanResult<T>* sums = nullptr) {
    const bool each = boosting_.options.reduction == Reduction::none, begins_with_rows = view.options.rows();
    const int64_t anchors = boosting_.anchors;
    const T* weights = incoming_ + (each ? boosting_.position(begins_with_rows) * anchors : 0);
    const bool accumulates = &view != &boosting_.views.front();
    const int64_t* chosen = negatives + first_negative(boosting_, view, begins_with_rows);
    const std::vector<T> of_positives =
        Gradient<T>(view.problem, weights, chosen, view.options, out(), accumulates).compute(sums);
    for (int64_t i = 0; i < anchors && !view.part.absolute; ++i) diagonal_[i] += of_positives[i];
    for (const bool is_rows : {true, false}) {
      if (!view.part.absolute || !(is_rows ? view.options.rows() : view.options.columns())) continue;
      const std::vector<int64_t>& counts = boosting_.positive_counts(is_rows);
      const T* of_direction = weights + (each && is_rows != begins_with_rows ? anchors : 0);
      for (int64_t i = 0; i < anchors; ++i) {
        if (counts[i] == 0 || boosting_.positive_term(view, i) == T(0)) continue;
        diagonal_[i] -= weight_of(view.options, of_direction, i, anchors) * static_cast<T>(counts[i]);
      }
    }
  }

  Tensor result() {
    for (int64_t i = 0; i < boosting_.anchors; ++i) out()[i * boosting_.anchors + i] = diagonal_[i];
    return gradient_;
  }

 private:
  T* out() { return static_cast<T*>(gradient_.mutable_data_ptr()); }

  const BoostingProblem<T>& boosting_;
  const T* incoming_;
  Tensor gradient_;
  std::vector<T> diagonal_;
};

template <typename T>
std::tuple<Tensor, Tensor> forward(const Tensor& scores, const Tensor& anchor_scores,
                                   const std::optional<Tensor>& positives, const BoostingOptions& options) {
  const BoostingProblem<T> boosting(scores, anchor_scores, positives, options);
  BoostingLosses<T> losses(boosting, scores);
  ScanResult<T> found;
  for (const auto& view : boosting.views) {
    if (!has_the_same(boosting, view)) found = scan_scores(view.problem, view.options);
    losses.add(view, found);
  }
  return {losses.loss(), losses.negatives()};
}

template <typename T>
Tensor backward(const Tensor& grad_loss, const Tensor& scores, const Tensor& anchor_scores,
                const std::optional<Tensor>& positives, const Tensor& negatives, const BoostingOptions& options) {
  const BoostingProblem<T> boosting(scores, anchor_scores, positives, options);
  const Tensor incoming = torch::stable::contiguous(grad_loss), chosen = torch::stable::contiguous(negatives);
  BoostingGradient<T> gradient(boosting, scores, static_cast<const T*>(incoming.const_data_ptr()));
  for (const auto& view : boosting.views) gradient.add(view, static_cast<const int64_t*>(chosen.const_data_ptr()));
  return gradient.result();
}

// As for triplet_loss: if all negatives take part, the pass that writes a view's gradient also computes its sums.
template <typename T>
std::tuple<Tensor, Tensor, Tensor> with_gradient(const Tensor& scores, const Tensor& anchor_scores,
                                                 const std::optional<Tensor>& positives,
                                                 const BoostingOptions& options) {
  const BoostingProblem<T> boosting(scores, anchor_scores, positives, options);
  const T one(1);
  BoostingLosses<T> losses(boosting, scores);
  BoostingGradient<T> gradient(boosting, scores, &one);
  const int64_t* chosen = static_cast<const int64_t*>(losses.negatives().const_data_ptr());
  ScanResult<T> found;
  for (const auto& view : boosting.views) {
    if (options.mining == Mining::all) {
      gradient.add(view, chosen, &found);
      losses.add(view, found);
    } else {
      if (!has_the_same(boosting, view)) found = scan_scores(view.problem, view.options);
      losses.add(view, found);
      gradient.add(view, chosen);
    }
  }
  return {losses.loss(), losses.negatives(), gradient.result()};
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

std::tuple<Tensor, Tensor, Tensor> boosting_loss_with_gradient(const Tensor& scores, const Tensor& anchor_scores,
                                                               const std::optional<Tensor>& positives,
                                                               const std::string& strategy, const std::string& mining,
                                                               double margin, double alpha, bool soft,
                                                               const std::string& directions,
                                                               const std::string& reduction) {
  const BoostingOptions options = boosting_options(strategy, mining, margin, alpha, soft, directions, reduction);
  check_boosting_scores(scores, anchor_scores, positives);
  check_reduced(options.reduction);
  const auto run = is_double(scores) ? with_gradient<double> : with_gradient<float>;
  return run(scores, anchor_scores, positives, options);
}

}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("boosting_loss", TORCH_BOX(&itm_fast::boosting_loss));
  m.impl("boosting_loss_backward", TORCH_BOX(&itm_fast::boosting_loss_backward));
  m.impl("boosting_loss_with_gradient", TORCH_BOX(&itm_fast::boosting_loss_with_gradient));
}
