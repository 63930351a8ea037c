// Shared by every backend of maxsim_scores: the options.
#pragma once

#include <cstdint>

namespace itm_fast {

enum class MaxsimReduction : int32_t { sum, mean };
enum class MaxsimDirection : int32_t { queries, contexts, both };

struct MaxsimOptions {
  MaxsimReduction reduction;
  MaxsimDirection direction;

  // Always inlined, so that code of one instruction set never serves another.
  __attribute__((always_inline)) constexpr bool by_queries() const { return direction != MaxsimDirection::contexts; }
  __attribute__((always_inline)) constexpr bool by_contexts() const { return direction != MaxsimDirection::queries; }
};

}  // namespace itm_fast
