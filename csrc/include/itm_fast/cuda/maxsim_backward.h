// The gradient of maxsim_scores on a GPU, from the best partners that score_maxsim has written: one launch.
//
// A warp sums kGatherColumns elements of the gradient of one row, in the order of the pairs of its set: first the best
// partner of the row, then the rows of the other side whose best partner it is. Nothing is added atomically, so the
// result depends only on the operands.
#pragma once

#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/maxsim.h"

namespace itm_fast::cuda {

inline constexpr int kGatherWarps = 8, kGatherThreads = 32 * kGatherWarps, kGatherColumns = 256;

template <typename S>
struct MaxsimGradients {
  MaxsimProblem<S> scoring;
  S *of_queries, *of_contexts;  // like the rows; null: not requested
};

// The blocks that gather the rows of one side.
constexpr int64_t gather_blocks(int64_t n_rows, int64_t dim) {
  return (n_rows + kGatherWarps - 1) / kGatherWarps * ((dim + kGatherColumns - 1) / kGatherColumns);
}

// One side, as seen from its own rows.
template <bool kOfQueries, typename S>
class GatheredSide {
 public:
  ITM_FAST_DEVICE GatheredSide(const MaxsimProblem<S>& p, S* gradient)
      : p_(p),
        gradient_(gradient),
        own_(kOfQueries ? p.queries : p.contexts),
        other_(kOfQueries ? p.contexts : p.queries) {}

  // For the whole warp.
  ITM_FAST_DEVICE void gather(int64_t row, int64_t first_column) {
    row_ = row;
    column_ = first_column + lane();
    columns_left_ = static_cast<int>(smaller(p_.dim - column_, kGatherColumns));
    set_ = set_of(row);
    const bool is_of_set = set_ < own_.n_sets && row - own_.offset(set_) < own_.length(set_);
    const int64_t n_candidates = !is_of_set ? 0 : p_.is_listed ? p_.n_pairs : other_.n_sets;
    for (int64_t first = 0; first < n_candidates; first += 32) {
      const int64_t candidate = first + lane();
      int64_t partner = 0;
      float weight = 0.0f;
      if (candidate < n_candidates) {
        partner = partner_of(candidate);
        if (partner >= 0) weight = p_.gradients[place(candidate)];
      }
      for (uint32_t left = ballot(weight != 0.0f); left != 0; left &= left - 1) {
        const int from = count_bits((left & (0 - left)) - 1);
        add_partner(first + from, shuffle(partner, from), shuffle(weight, from));
      }
    }
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 < columns_left_) narrow(sums_[i], gradient_[row_ * p_.dim + column_ + i * 32]);
    }
  }

 private:
  static constexpr int kPerLane = kGatherColumns / 32;

  // The last set that does not begin past the row; empty sets at the same row come before it.
  ITM_FAST_DEVICE int64_t set_of(int64_t row) const {
    int64_t first = 0, end = own_.n_sets;
    while (first + 1 < end) {
      const int64_t middle = (first + end) / 2;
      if (own_.offset(middle) <= row) {
        first = middle;
      } else {
        end = middle;
      }
    }
    return first;
  }

  // The other set of a candidate, or -1 if the pair is not one of this set.
  ITM_FAST_DEVICE int64_t partner_of(int64_t candidate) const {
    if (!p_.is_listed) return candidate;
    const MaxsimPair pair = maxsim_pair(p_, candidate);
    return (kOfQueries ? pair.query : pair.context) == set_ ? (kOfQueries ? pair.context : pair.query) : -1;
  }

  ITM_FAST_DEVICE int64_t place(int64_t candidate) const {
    if (p_.is_listed) return candidate;
    return kOfQueries ? set_ * p_.contexts.n_sets + candidate : candidate * p_.contexts.n_sets + set_;
  }

  ITM_FAST_DEVICE void add_partner(int64_t candidate, int64_t partner, float weight) {
    const int64_t start = other_.offset(partner), length = other_.length(partner), own_length = own_.length(set_);
    if (length == 0) return;
    const bool is_mean = p_.options.reduction == MaxsimReduction::mean;
    const bool own_direction = kOfQueries ? p_.options.by_queries() : p_.options.by_contexts();
    const bool other_direction = kOfQueries ? p_.options.by_contexts() : p_.options.by_queries();
    const int64_t own_start = own_.offset(set_), own_place = row_ - own_start;
    const PartnerRange of_own = partner_range(p_, kOfQueries, own_start, partner, candidate);
    const PartnerRange of_other = partner_range(p_, !kOfQueries, start, set_, candidate);
    if ((own_direction && own_length > of_own.room) || (other_direction && length > of_other.room)) {
      for (float& sum : sums_) sum = HUGE_VALF - HUGE_VALF;
      return;
    }
    if (own_direction) {
      const int64_t found = (kOfQueries ? p_.best_contexts : p_.best_queries)[of_own.begin + own_place];
      // Only invalid offsets lead outside of the set.
      if (found >= 0 && found < length)
        add_row(start + found, is_mean ? weight / static_cast<float>(own_length) : weight);
    }
    if (!other_direction) return;
    const int32_t* best = (kOfQueries ? p_.best_queries : p_.best_contexts) + of_other.begin;
    for (int64_t first = 0; first < length; first += 32) {
      const int64_t at = first + lane();
      for (uint32_t left = ballot(at < length && best[at] == own_place); left != 0; left &= left - 1) {
        const int from = count_bits((left & (0 - left)) - 1);
        add_row(start + first + from, is_mean ? weight / static_cast<float>(length) : weight);
      }
    }
  }

  ITM_FAST_DEVICE void add_row(int64_t row, float weight) {
    const S* const values = other_.values + row * p_.dim + column_;
    ITM_FAST_UNROLLED
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 < columns_left_) sums_[i] += weight * widen(values[i * 32]);
    }
  }

  const MaxsimProblem<S>& p_;
  S* const gradient_;
  const SetRows<S>&own_, &other_;
  int64_t row_ = 0, set_ = 0, column_ = 0;  // the lane's first column
  int columns_left_ = 0;                    // from there
  float sums_[kPerLane] = {};
};

template <bool kOfQueries, typename S>
ITM_FAST_DEVICE void gather_side(const MaxsimProblem<S>& p, S* gradient, int64_t block) {
  const int64_t slices = (p.dim + kGatherColumns - 1) / kGatherColumns;
  const int64_t row = block / slices * kGatherWarps + warp();
  if (row >= (kOfQueries ? p.queries : p.contexts).n_rows) return;
  GatheredSide<kOfQueries, S>(p, gradient).gather(row, block % slices * kGatherColumns);
}

// Grid: gather_blocks of the rows of the queries, then of the contexts, as far as they are requested.
template <typename S>
ITM_FAST_DEVICE void gather_maxsim(const MaxsimGradients<S>& p) {
  const int64_t of_queries = p.of_queries != nullptr ? gather_blocks(p.scoring.queries.n_rows, p.scoring.dim) : 0;
  if (block_index() < of_queries) {
    gather_side<true>(p.scoring, p.of_queries, block_index());
  } else {
    gather_side<false>(p.scoring, p.of_contexts, block_index() - of_queries);
  }
}

}  // namespace itm_fast::cuda
