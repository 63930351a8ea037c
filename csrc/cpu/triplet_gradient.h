// The dense gradient of losses over a score matrix on the CPU.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cpu/huge_pages.h"
#include "cpu/triplet_scan.h"

namespace itm_fast {

// The incoming gradient of one of `anchors` anchors; `incoming` is one value, or one per anchor for Reduction::none.
template <typename T>
T weight_of(const TripletOptions& options, const T* incoming, int64_t anchor, int64_t anchors) {
  T scale = options.halve ? T(0.5) : T(1);
  if (options.reduction == Reduction::mean) scale /= static_cast<T>(std::max<int64_t>(anchors, 1));
  return scale * incoming[options.reduction == Reduction::none ? anchor : 0];
}

// The gradient of the losses with respect to the scores and to the scores of the positives. `grad_loss` and `negatives`
// begin with the first direction of the options. The gradient is written to `out`, or added to it.
template <typename T>
class Gradient {
 public:
  Gradient(const Problem<T>& problem, const T* grad_loss, const int64_t* negatives, const TripletOptions& options,
           T* out, bool accumulates = false)
      : problem_(problem),
        options_(options),
        grad_loss_(grad_loss),
        negatives_(negatives),
        out_(out),
        accumulates_(accumulates) {
    if (options.rows()) add_side(rows_, true, 0);
    if (options.columns()) add_side(columns_, false, options.rows() ? 1 : 0);
  }

  // Fills the gradient of the scores; returns the gradient of the positives, one per anchor. If all negatives take part
  // and `sums` is not null, the pass also computes the sums of their hinges.
  std::vector<T> compute(ScanResult<T>* sums = nullptr) {
    std::vector<T> positive(options_.rows() ? problem_.rows : problem_.columns, T(0));
    const bool spreads = (rows_ && rows_->weights.spreads) || (columns_ && columns_->weights.spreads);
    std::vector<int64_t> row_count(spreads && rows_ ? problem_.rows : 0);
    const int64_t in_blocks = spreads && columns_ ? problem_.n_blocks * problem_.padded_columns : 0;
    Buffer<LaneInteger<T>> column_count(in_blocks);
    Buffer<T> column_sum(sums != nullptr ? in_blocks : 0);
    if (sums != nullptr && rows_) sums->rows.sum.resize(problem_.rows);
    const auto& table = triplet_kernels(T());
    // Every thread writes its own rows first, and each column's single negative after all rows are written.
    problem_.for_blocks([&](int64_t index) {
      const TripletBlock<T> block = problem_.block(index, options_);
      if (spreads) {
        TripletSpread<T> spread{};
        if (rows_) {
          spread.row_weight = rows_->weights.spread.data();
          spread.row_count = row_count.data();
          if (sums != nullptr) spread.row_sum = sums->rows.sum.data();
        }
        if (columns_) {
          spread.column_weight = columns_->weights.spread.data();
          spread.column_count = column_count.data() + index * problem_.padded_columns;
          if (sums != nullptr) spread.column_sum = column_sum.data() + index * problem_.padded_columns;
        }
        spread.gradient = out_;
        spread.accumulates = accumulates_;
        table.spread(block, spread);
      } else if (!accumulates_) {
        std::fill(out_ + block.first_row * problem_.columns, out_ + block.last_row * problem_.columns, T(0));
      }
      if (rows_) add_single(*rows_, block.first_row, block.last_row, positive);
    });
    if (columns_) add_single(*columns_, 0, problem_.columns, positive);
    if (spreads && rows_) add_counted(*rows_, row_count, positive);
    if (spreads && columns_) {
      add_counted(*columns_, sum_of_blocks<T, LaneInteger<T>, int64_t>(problem_, column_count.data()), positive);
      if (sums != nullptr) sums->columns.sum = sum_of_blocks<T, T, double>(problem_, column_sum.data());
    }
    return positive;
  }

 private:
  struct Weights {
    std::vector<T> single;  // of the one negative that receives an anchor's gradient
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
    const T* incoming = grad_loss_ + (options_.reduction == Reduction::none ? position * anchors : 0);
    Weights weights;
    const bool all = options_.mining == Mining::all;
    if (!all) weights.negatives = negatives_ + position * anchors;
    weights.single.resize(anchors);
    weights.spread.assign(padded_to_lanes(anchors), T(0));
    for (int64_t i = 0; i < anchors; ++i) {
      const T weight = weight_of(options_, incoming, i, anchors);
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
      // A non-finite weight must not turn a count of 0 into NaN.
      if (count[i] > 0) positive[i] -= side.weights.spread[i] * static_cast<T>(count[i]);
    }
  }

  const Problem<T>& problem_;
  const TripletOptions& options_;
  const T* grad_loss_;
  const int64_t* negatives_;
  T* out_;
  bool accumulates_;
  std::optional<Side> rows_, columns_;
};

// Allocates an uninitialised matrix for the gradient of the scores.
template <typename T>
torch::stable::Tensor new_gradient(const torch::stable::Tensor& scores) {
  torch::stable::Tensor gradient = torch::stable::new_empty(scores, {scores.size(0), scores.size(1)});
  prefer_huge_pages(gradient.mutable_data_ptr(), gradient.numel() * static_cast<int64_t>(sizeof(T)));
  return gradient;
}

// The gradients of the scores and of separate positives, which is empty if positives are on the diagonal. The arguments
// are those of `Gradient`.
template <typename T>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> gradients_of(const Problem<T>& problem, const T* grad_loss,
                                                                      const int64_t* negatives,
                                                                      const TripletOptions& options,
                                                                      const torch::stable::Tensor& scores,
                                                                      ScanResult<T>* sums = nullptr) {
  torch::stable::Tensor grad_scores = new_gradient<T>(scores);
  T* out = static_cast<T*>(grad_scores.mutable_data_ptr());
  const std::vector<T> positive = Gradient<T>(problem, grad_loss, negatives, options, out).compute(sums);
  const int64_t separate = problem.has_diagonal ? 0 : static_cast<int64_t>(positive.size());
  torch::stable::Tensor grad_positive = torch::stable::new_empty(scores, {separate});
  if (problem.has_diagonal) {
    for (int64_t i = 0; i < problem.rows; ++i) out[i * problem.columns + i] = positive[i];
  } else {
    std::copy(positive.begin(), positive.end(), static_cast<T*>(grad_positive.mutable_data_ptr()));
  }
  return {grad_scores, grad_positive};
}

}  // namespace itm_fast
