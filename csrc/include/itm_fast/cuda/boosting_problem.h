// boosting_loss in the form of the triplet_loss kernels: one part per strategy, each a triplet loss over gaps.
#pragma once

#include "itm_fast/boosting_loss.h"
#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"

namespace itm_fast::cuda {

// Both score matrices, dense and square. The functions are those of TripletProblem.
template <typename Number>
struct BoostingProblem {
  using T = Number;
  static constexpr int kMaxParts = 2;

  const T *scores, *anchor_scores;
  const bool* positives;
  int64_t rows, columns;
  int32_t n_parts;
  BoostingPart<T> part_of[kMaxParts];

  constexpr int parts() const { return n_parts; }
  constexpr bool has_diagonal() const { return true; }
  ITM_FAST_DEVICE T margin(int part, const TripletOptions&) const { return part_of[part].constant_margin(); }
  ITM_FAST_DEVICE T gap(int64_t at) const { return scores[at] - anchor_scores[at]; }
  ITM_FAST_DEVICE T positive(int part, int64_t anchor) const {
    return part_of[part].absolute ? T(0) : gap(anchor * columns + anchor);
  }
  ITM_FAST_DEVICE T own(int part, int64_t anchor) const {
    return shares_keys(part) ? T(0) : anchor_scores[anchor * columns + anchor];
  }
  ITM_FAST_DEVICE T key(int part, int64_t at, T own) const {
    const BoostingPart<T>& of = part_of[part];
    if (!of.negative.is_soft()) return gap(at);
    return margin_at(of.negative, of.absolute ? anchor_scores[at] : own - anchor_scores[at]) + gap(at);
  }
  constexpr bool shares_keys(int part) const { return part_of[part].absolute || !part_of[part].negative.is_soft(); }
  constexpr bool has_positive_term(int part) const { return part_of[part].absolute; }
  ITM_FAST_DEVICE T positive_term(int part, int64_t anchor) const {
    if (!part_of[part].absolute) return T(0);
    const int64_t at = anchor * columns + anchor;
    return hinge(margin_at(part_of[part].positive, anchor_scores[at]), T(0), gap(at));
  }

  ITM_FAST_DEVICE bool is_negative(int64_t row, int64_t column) const {
    return row != column && !(positives != nullptr && positives[row * columns + column]);
  }
  // Only "selective" uses it, which boosting_loss does not offer.
  ITM_FAST_DEVICE T divisor(const TripletOptions&, int64_t) const { return T(1); }

 private:
  ITM_FAST_DEVICE static T margin_at(const Margin<T>& margin, T r) {
    if (!margin.is_soft()) return margin.size;
    return T(2) * margin.size / (T(1) + exponential(margin.slope * (r - margin.end))) - margin.size;
  }
};

template <typename T>
constexpr BoostingProblem<T> boosting_problem(const T* scores, const T* anchor_scores, const bool* positives,
                                              int64_t size, const BoostingOptions& options) {
  BoostingProblem<T> problem{scores, anchor_scores, positives, size, size, options.n_strategies(), {}};
  for (int part = 0; part < options.n_strategies(); ++part) {
    problem.part_of[part] = boosting_part<T>(options, options.is_absolute(part));
  }
  return problem;
}

// The options that all parts share.
constexpr TripletOptions shared_options(const BoostingOptions& options) {
  return triplet_options_of(options, boosting_part<double>(options, false));
}

}  // namespace itm_fast::cuda
