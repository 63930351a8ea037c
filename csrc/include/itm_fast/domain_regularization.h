// Shared by every backend of domain_regularization: the options and the kinds of risks.
#pragma once

#include <cstdint>

namespace itm_fast {

enum class RiskAggregation : int32_t { sum, mean };

struct DomainOptions {
  double margin;
  RiskAggregation aggregation;
};

// The risks of pair p with the negatives q and r, R_features(f_discriminator). Arrays hold one row for each kind, or
// only the first if there are no negatives.
enum RiskKind : int {
  kOwn,        // R_p(f_p)
  kByCaption,  // R_p(f_q)
  kOfCaption,  // R_q(f_p)
  kByImage,    // R_p(f_r)
  kOfImage,    // R_r(f_p)
  kRiskKinds
};

// Whether a kind's features are those of the negative, and its discriminator that of p.
constexpr bool has_foreign_features(int kind) { return kind == kOfCaption || kind == kOfImage; }
constexpr bool is_of_caption(int kind) { return kind == kByCaption || kind == kOfCaption; }

}  // namespace itm_fast
