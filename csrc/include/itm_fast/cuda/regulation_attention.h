// Softmax and norms of regulated cross-attention on a GPU, independent of storage: numbers are accessed through
// functions of an index.
#pragma once

#include "itm_fast/cuda/attention_pair.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

// Normalises the raw scores at(row), of the rows from `first` to `last` with one context, over these rows. Uses
// division: the scores of a set's only query are all 1 or -1 up to the epsilon, and rounding must not make them differ,
// because focal attention compares them.
template <typename At>
ITM_FAST_DEVICE void normalize_over_queries(const At& at, int first, int last, const PairOptions& options) {
  RowStatistics statistics;
  for (int j = first; j < last; ++j) statistics.add(at(j), options);
  if (options.is_softmax()) {
    const float factor = statistics.factor(options);
    for (int j = first; j < last; ++j) at(j) = expf(at(j) - factor);
    return;
  }
  const float denominator = statistics.denominator(options);
  load_ahead(
      first, last, [&](int j) { return options.clipped(at(j)) / denominator; },
      [&](int j, float normalized) { at(j) = normalized; });
}

// The softmax of temperature * at(k) over the n contexts of one row, with its focal reassignment: calls store(k, p).
// For a warp; a lane takes every 32nd context, at most kPerLane.
template <int kPerLane, typename At, typename Store>
ITM_FAST_DEVICE void attend_row(const At& at, const Store& store, int n, float temperature, Focal focal) {
  float e[kPerLane];
  float peak = -HUGE_VALF;
  ITM_FAST_UNROLLED
  for (int i = 0; i < kPerLane; ++i) {
    const int k = lane() + 32 * i;
    e[i] = k < n ? temperature * at(k) : -HUGE_VALF;
    peak = later_peak(peak, e[i]);
  }
  for (int step = 16; step > 0; step /= 2) peak = later_peak(peak, shuffle_xor(peak, step));
  float total = 0.0f;
  ITM_FAST_UNROLLED
  for (int i = 0; i < kPerLane; ++i) {
    e[i] = lane() + 32 * i < n ? expf(e[i] - peak) : 0.0f;
    total += e[i];
  }
  total = add_lanes(total);
  if (focal != Focal::none) {
    FocalRule rule;
    rule.total = total;
    ITM_FAST_UNROLLED
    for (int i = 0; i < kPerLane; ++i) {
      if (lane() + 32 * i < n) rule.add(e[i], focal);
    }
    rule.weight = add_lanes(rule.weight);
    rule.bound = add_lanes(rule.bound);
    rule.drops = true;
    bool any = false;
    ITM_FAST_UNROLLED
    for (int i = 0; i < kPerLane; ++i) any = any || (lane() + 32 * i < n && rule.keeps(e[i]));
    rule.drops = vote_any(any);
    total = 0.0f;
    ITM_FAST_UNROLLED
    for (int i = 0; i < kPerLane; ++i) {
      if (!rule.keeps(e[i])) e[i] = 0.0f;
      total += e[i];
    }
    total = add_lanes(total);
  }
  ITM_FAST_UNROLLED
  for (int i = 0; i < kPerLane; ++i) {
    if (lane() + 32 * i < n) store(lane() + 32 * i, e[i] / total);
  }
}

// The same for at most kMostContexts contexts. More than the columns of a tile take more registers.
template <typename Tile, typename At, typename Store>
ITM_FAST_DEVICE void attend_contexts(const At& at, const Store& store, int n, float temperature, Focal focal) {
  if (n <= Tile::kColumns) {
    attend_row<Tile::kColumns / 32>(at, store, n, temperature, focal);
  } else {
    attend_row<kMostContexts / 32>(at, store, n, temperature, focal);
  }
}

// The softmax of at(first) to at(last - 1), in place.
template <typename At>
ITM_FAST_DEVICE void softmax_of_rows(const At& at, int first, int last) {
  if (first == last) return;
  float peak = at(first), total = 0.0f;
  for (int j = first + 1; j < last; ++j) {
    const float logit = at(j);
    peak = peak < logit ? logit : peak;
  }
  for (int j = first; j < last; ++j) {
    const float numerator = expf(at(j) - peak);
    at(j) = numerator;
    total += numerator;
  }
  for (int j = first; j < last; ++j) at(j) = at(j) / total;
}

}  // namespace itm_fast::cuda
