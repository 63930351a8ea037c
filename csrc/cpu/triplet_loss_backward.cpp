// The gradients of triplet_loss and hardest_negatives on the CPU. Only here does a dense matrix come to be, written
// once.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/huge_pages.h"
#include "cpu/memory.h"
#include "cpu/triplet_problem.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The gradient of the losses with respect to the scores and to the scores of the positives.
template <typename T>
class Gradient {
 public:
  Gradient(const Problem<T>& problem, const Tensor& grad_loss, const Tensor& negatives, const TripletOptions& options,
           T* out)
      : problem_(problem),
        options_(options),
        grad_loss_(torch::stable::contiguous(grad_loss)),
        negatives_(torch::stable::contiguous(negatives)),
        out_(out) {
    if (options.rows()) add_side(rows_, true, 0);
    if (options.columns()) add_side(columns_, false, options.rows() ? 1 : 0);
  }

  // Fills the gradient of the scores; returns that of the positives, one per anchor.
  std::vector<T> compute() {
    std::vector<T> positive(options_.rows() ? problem_.rows : problem_.columns, T(0));
    const bool spreads = (rows_ && rows_->weights.spreads) || (columns_ && columns_->weights.spreads);
    std::vector<int64_t> row_count(spreads && rows_ ? problem_.rows : 0);
    const int64_t in_blocks = spreads && columns_ ? problem_.n_blocks * problem_.padded_columns : 0;
    Buffer<LaneInteger<T>> column_count(in_blocks);
    const auto& table = triplet_kernels(T());
    // Every thread writes its own rows first, and each column's single negative after all rows are written.
    problem_.for_blocks([&](int64_t index) {
      const TripletBlock<T> block = problem_.block(index, options_);
      if (spreads) {
        TripletSpread<T> spread{};
        if (rows_) {
          spread.row_weight = rows_->weights.spread.data();
          spread.row_count = row_count.data();
        }
        if (columns_) {
          spread.column_weight = columns_->weights.spread.data();
          spread.column_count = column_count.data() + index * problem_.padded_columns;
        }
        spread.gradient = out_;
        table.spread(block, spread);
      } else {
        std::fill(out_ + block.first_row * problem_.columns, out_ + block.last_row * problem_.columns, T(0));
      }
      if (rows_) add_single(*rows_, block.first_row, block.last_row, positive);
    });
    if (columns_) add_single(*columns_, 0, problem_.columns, positive);
    if (spreads && rows_) add_counted(*rows_, row_count, positive);
    if (spreads && columns_) {
      std::vector<int64_t> count(problem_.columns, 0);
      for (int64_t index = 0; index < problem_.n_blocks; ++index) {
        const LaneInteger<T>* in_block = column_count.data() + index * problem_.padded_columns;
        for (int64_t j = 0; j < problem_.columns; ++j) count[j] += in_block[j];
      }
      add_counted(*columns_, count, positive);
    }
    return positive;
  }

 private:
  struct Weights {
    std::vector<T> single;  // of the one negative that an anchor's gradient goes to
    std::vector<T> spread;  // of each active hinge; padded to whole vectors
    const int64_t* negatives = nullptr;
    bool spreads = false;
  };
  struct Side {
    Direction<T> direction;
    Weights weights;
  };

  void add_side(std::optional<Side>& side, bool is_rows, int64_t position) const {
    const Direction<T> direction{problem_, is_rows};
    side.emplace(Side{direction, weights_of(direction, position)});
  }

  Weights weights_of(const Direction<T>& direction, int64_t position) const {
    const int64_t anchors = direction.anchors();
    const T* incoming = static_cast<const T*>(grad_loss_.const_data_ptr());
    const bool each = options_.reduction == Reduction::none;
    T scale = options_.halve ? T(0.5) : T(1);
    if (options_.reduction == Reduction::mean) scale /= static_cast<T>(std::max<int64_t>(anchors, 1));
    Weights weights;
    const bool all = options_.mining == Mining::all;
    if (!all) weights.negatives = static_cast<const int64_t*>(negatives_.const_data_ptr()) + position * anchors;
    weights.single.resize(anchors);
    weights.spread.assign(padded_to_lanes(anchors), T(0));
    for (int64_t i = 0; i < anchors; ++i) {
      const T weight = scale * incoming[each ? position * anchors + i : 0];
      weights.single[i] = weight;
      if (all || weights.negatives[i] == kAllNegatives) {
        weights.spread[i] = all ? weight : weight / direction.divisor(options_);
        weights.spreads = true;
      }
    }
    return weights;
  }

  void add_single(const Side& side, int64_t first, int64_t last, std::vector<T>& positive) const {
    if (side.weights.negatives == nullptr) return;
    for (int64_t i = first; i < last; ++i) {
      const int64_t negative = side.weights.negatives[i];
      if (negative < 0 || negative >= side.direction.candidates()) continue;
      const int64_t at = side.direction.offset(i, negative);
      const T weight = side.weights.single[i];
      out_[at] += weight;
      if (!pushes_hardest(options_, problem_.scores[at], problem_.anchors()[i])) positive[i] -= weight;
    }
  }

  void add_counted(const Side& side, const std::vector<int64_t>& count, std::vector<T>& positive) const {
    for (int64_t i = 0; i < side.direction.anchors(); ++i) {
      // A weight that is not finite must not turn a count of 0 into NaN.
      if (count[i] > 0) positive[i] -= side.weights.spread[i] * static_cast<T>(count[i]);
    }
  }

  const Problem<T>& problem_;
  const TripletOptions& options_;
  const Tensor grad_loss_, negatives_;
  T* out_;
  std::optional<Side> rows_, columns_;
};

template <typename T>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_loss, const Tensor& scores,
                                    const std::optional<Tensor>& positives,
                                    const std::optional<Tensor>& positive_scores, const Tensor& negatives,
                                    const TripletOptions& options) {
  const Problem<T> problem(scores, positives, positive_scores);
  Tensor grad_scores = torch::stable::new_empty(scores, {problem.rows, problem.columns});
  T* out = static_cast<T*>(grad_scores.mutable_data_ptr());
  prefer_huge_pages(out, problem.rows * problem.columns * static_cast<int64_t>(sizeof(T)));
  const std::vector<T> positive = Gradient<T>(problem, grad_loss, negatives, options, out).compute();
  const int64_t separate = problem.has_diagonal ? 0 : static_cast<int64_t>(positive.size());
  Tensor grad_positive = torch::stable::new_empty(scores, {separate});
  if (problem.has_diagonal) {
    for (int64_t i = 0; i < problem.rows; ++i) out[i * problem.columns + i] = positive[i];
  } else {
    std::copy(positive.begin(), positive.end(), static_cast<T*>(grad_positive.mutable_data_ptr()));
  }
  return {grad_scores, grad_positive};
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
