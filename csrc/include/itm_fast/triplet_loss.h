// Shared by every backend of triplet_loss: the options, the hinge, and the loss of one anchor. Functions are constexpr
// so that nvcc compiles them for host and device.
#pragma once

#include <cstdint>

namespace itm_fast {

enum class Mining : int32_t { all, hardest, selective, semi_hard, contrastive };
enum class SelectiveDivisor : int32_t { batch, negatives };
enum class Directions : int32_t { both, rows, columns };
enum class Reduction : int32_t { sum, mean, none };

struct TripletOptions {
  double margin;
  double epsilon;
  Mining mining;
  SelectiveDivisor selective_divisor;
  bool halve;
  Directions directions;
  Reduction reduction;

  constexpr bool rows() const { return directions != Directions::columns; }
  constexpr bool columns() const { return directions != Directions::rows; }
  constexpr bool needs_hardest() const { return mining != Mining::all; }
  constexpr bool needs_sums() const { return mining == Mining::all || mining == Mining::selective; }
};

// In place of the index of the negative that receives an anchor's gradient.
inline constexpr int64_t kNoGradient = -1;
inline constexpr int64_t kAllNegatives = -2;

// [margin + negative - positive]_+; NaN passes, and only x <= 0 has no gradient.
template <typename T>
static constexpr T hinge(T margin, T negative, T positive) {
  const T x = margin + negative - positive;
  return x <= T(0) ? T(0) : x;
}

template <typename T>
struct AnchorLoss {
  T value;
  int64_t negative;  // index, kNoGradient or kAllNegatives
};

// Whether "contrastive" pushes the hardest negative down by its own score instead of the hinge.
template <typename T>
static constexpr bool pushes_hardest(const TripletOptions& options, T hardest, T positive) {
  return options.mining == Mining::contrastive && hardest >= positive;
}

// `hardest` and its index belong to the mining's candidates, of which there is at least one. `average` is the sum of
// the hinges over the divisor; only "selective" reads it.
template <typename T>
static constexpr AnchorLoss<T> mined_loss(const TripletOptions& options, T positive, T hardest, int64_t index,
                                          T average) {
  if (options.mining == Mining::selective && options.epsilon != 0.0) {
    const T gap = hardest < positive ? positive - hardest : hardest - positive;
    if (!(gap > static_cast<T>(options.epsilon))) return {average, kAllNegatives};
  }
  if (pushes_hardest(options, hardest, positive)) return {hardest, index};
  const T value = hinge(static_cast<T>(options.margin), hardest, positive);
  return {value, value == T(0) ? kNoGradient : index};
}

}  // namespace itm_fast
