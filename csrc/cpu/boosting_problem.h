// Express boosting_loss on the CPU as a set of triplet losses.
#pragma once

#include <vector>

#include "cpu/triplet_problem.h"
#include "itm_fast/boosting_loss.h"

namespace itm_fast {

template <typename T>
class BoostingProblem {
 public:
  // One strategy, or one direction of it if soft margins make the gaps of rows and columns differ.
  struct View {
    int strategy;  // position among the strategies
    BoostingPart<T> part;
    TripletOptions options;
    Problem<T> problem;
  };

  BoostingProblem(const torch::stable::Tensor& scores, const torch::stable::Tensor& anchor_scores,
                  const std::optional<torch::stable::Tensor>& positives, const BoostingOptions& options)
      : options(options),
        anchors(scores.size(0)),
        scores_(torch::stable::contiguous(scores)),
        anchor_scores_(torch::stable::contiguous(anchor_scores)),
        own_(padded_to_lanes(anchors), T(0)),
        gap_(own_) {
    const T* score = static_cast<const T*>(scores_.const_data_ptr());
    const T* anchor_score = static_cast<const T*>(anchor_scores_.const_data_ptr());
    for (int64_t i = 0; i < anchors; ++i) {
      own_[i] = anchor_score[i * anchors + i];
      gap_[i] = score[i * anchors + i] - own_[i];
    }
    const std::vector<T> zeros(own_.size(), T(0));
    for (int strategy = 0; strategy < options.n_strategies(); ++strategy) {
      const BoostingPart<T> part = boosting_part<T>(options, options.is_absolute(strategy));
      PairKey<T> key{anchor_score, part.negative, nullptr, nullptr};
      const TripletOptions triplet = triplet_options_of(options, part);
      const auto add = [&](Directions directions) {
        View view{strategy, part, triplet, {scores_, positives, part.absolute ? zeros : gap_, key}};
        view.options.directions = directions;
        views.push_back(std::move(view));
      };
      if (part.absolute || !part.negative.is_soft()) {
        add(options.directions);
        continue;
      }
      key.row_own = own_.data();
      if (triplet.rows()) add(Directions::rows);
      key.row_own = nullptr;
      key.column_own = own_.data();
      if (triplet.columns()) add(Directions::columns);
    }
    count_positive_terms();
  }

  BoostingProblem(const BoostingProblem&) = delete;
  BoostingProblem& operator=(const BoostingProblem&) = delete;

  // Index of a direction in results per direction.
  int64_t position(bool is_rows) const { return is_rows || options.directions != Directions::both ? 0 : 1; }

  // [margin1 + a_pos - s_pos]_+ of the absolute strategy.
  T positive_term(const View& view, int64_t anchor) const {
    return hinge(margin_at(view.part.positive, own_[anchor]), T(0), gap_[anchor]);
  }

  // How many times each anchor's positive term counts.
  const std::vector<int64_t>& positive_counts(bool is_rows) const { return counts_[is_rows ? 0 : 1]; }

  const BoostingOptions options;
  const int64_t anchors;
  std::vector<View> views;

 private:
  void count_positive_terms() {
    const bool once = options.mining == Mining::hardest;
    for (auto& counts : counts_) counts.assign(anchors, once ? 1 : anchors - 1);
    const uint8_t* positives = views.front().problem.positives;
    if (once || positives == nullptr || options.strategy == Strategy::relative) return;
    for (int64_t row = 0; row < anchors; ++row) {
      for (int64_t column = 0; column < anchors; ++column) {
        if (row == column || positives[row * anchors + column] == 0) continue;
        --counts_[0][row];
        --counts_[1][column];
      }
    }
  }

  const torch::stable::Tensor scores_, anchor_scores_;
  std::vector<T> own_, gap_;
  std::vector<int64_t> counts_[2];  // of rows, of columns
};

}  // namespace itm_fast
