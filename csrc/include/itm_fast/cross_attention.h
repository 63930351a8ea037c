// Shared by every backend of cross_attention: the options and plain views of the operands.
#pragma once

#include <cstdint>

namespace itm_fast {

enum class Normalization : int32_t { clipped_l2norm, l2norm, clipped_l1norm, l1norm, softmax, clipped, no_norm };
enum class Focal : int32_t { none, equal, prob, hard };
enum class Aggregation : int32_t { mean, sum, max, logsumexp };

struct CrossAttentionOptions {
  double temperature;
  double negative_slope;
  double logsumexp_temperature;
  Normalization normalization;
  Focal focal;
  Aggregation aggregation;
};

inline constexpr double kNormEpsilon = 1e-8;  // added to norms in the attention; minimum denominator of a cosine

// Concatenated sets of row vectors; set i is rows offsets[i] up to offsets[i + 1].
template <typename T>
struct FragmentsView {
  const T* values;  // (rows, dim), row-major
  const int64_t* offsets;
  int64_t n_sets;
  int64_t dim;

  // Always inlined, so that code of one instruction set never serves another.
  __attribute__((always_inline)) int64_t length(int64_t set) const { return offsets[set + 1] - offsets[set]; }
  __attribute__((always_inline)) const T* set_values(int64_t set) const { return values + offsets[set] * dim; }
};

}  // namespace itm_fast
