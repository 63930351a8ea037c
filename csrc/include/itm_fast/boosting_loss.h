// Shared by every backend of boosting_loss: the options, the margins, and how a strategy becomes a triplet loss.
//
// The gap d = s - a of a pair is its score minus the anchor branch's. An anchor of the relative strategy has the hinges
// [margin + d_neg - d_pos]_+, one of the absolute strategy [margin2 + d_neg - 0]_+: triplet losses over gaps with d_pos
// or 0 as the positive. The absolute strategy adds its positive term [margin1 - d_pos]_+. A soft margin replaces a
// fixed one pair by pair, and so becomes part of the gap. Functions are constexpr so that nvcc compiles them for host
// and device.
#pragma once

#include "itm_fast/triplet_loss.h"

namespace itm_fast {

enum class Strategy : int32_t { relative, absolute, both };

struct BoostingOptions {
  Strategy strategy;
  Mining mining;  // all or hardest
  double margin, alpha;
  bool soft;
  Directions directions;
  Reduction reduction;

  constexpr int n_strategies() const { return strategy == Strategy::both ? 2 : 1; }
  constexpr int n_directions() const { return directions == Directions::both ? 2 : 1; }
  constexpr bool is_absolute(int part) const { return strategy == Strategy::absolute || part == 1; }
};

// Fixed (slope 0), or for a value r of the anchor branch 2 size / (1 + exp(slope (r - end))) - size.
template <typename T>
struct Margin {
  T size, slope, end;

  constexpr bool is_soft() const { return slope != T(0); }
};

// One strategy: the margins of its negatives and of its positive.
template <typename T>
struct BoostingPart {
  bool absolute;
  Margin<T> negative, positive;

  // Added to every gap in the hinge; soft margins are already part of the gap.
  constexpr T constant_margin() const { return negative.is_soft() ? T(0) : negative.size; }
};

// `sign` is 1 for an upper margin, which falls from `size` to 0 at r = end, and -1 for a lower one, which rises from 0.
template <typename T>
static constexpr Margin<T> margin_of_size(double size, bool soft, double sign, double end) {
  constexpr double kSmallest = 1.17549435e-38;  // Below this, float32 has no reciprocal: treated as 0.
  if (size < kSmallest) return {T(0), T(0), T(0)};
  return {static_cast<T>(size), soft ? static_cast<T>(sign * 2.0 / size) : T(0), static_cast<T>(sign * end)};
}

template <typename T>
static constexpr BoostingPart<T> boosting_part(const BoostingOptions& options, bool absolute) {
  if (!absolute) return {false, margin_of_size<T>(options.margin, options.soft, 1.0, 2.0), {T(0), T(0), T(0)}};
  return {true, margin_of_size<T>((1.0 - options.alpha) * options.margin, options.soft, -1.0, 1.0),
          margin_of_size<T>(options.alpha * options.margin, options.soft, 1.0, 1.0)};
}

// The triplet loss over gaps of a strategy. The mean of two strategies halves each.
template <typename T>
static constexpr TripletOptions triplet_options_of(const BoostingOptions& options, const BoostingPart<T>& part) {
  TripletOptions result{};
  result.margin = part.constant_margin();
  result.mining = options.mining;
  result.halve = options.strategy == Strategy::both;
  result.directions = options.directions;
  result.reduction = options.reduction;
  return result;
}

// The positive term, counted once per direction ("hardest") or once per negative ("all"). NaN is kept.
template <typename T>
static constexpr T counted_term(T term, int64_t count) {
  if (count == 0) return term == term ? T(0) : term;
  return term * static_cast<T>(count);
}

}  // namespace itm_fast
