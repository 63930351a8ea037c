#include "ops/maxsim.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <string_view>

#include "ops/cross_attention.h"
#include "ops/devices.h"
#include "ops/options.h"

namespace itm_fast {

MaxsimOptions maxsim_options(const std::string& reduction, const std::string& direction) {
  using namespace std::string_view_literals;
  return {parse_option<MaxsimReduction>("reduction", reduction, std::array{"sum"sv, "mean"sv}),
          parse_option<MaxsimDirection>("direction", direction, std::array{"queries"sv, "contexts"sv, "both"sv})};
}

void check_pairs(const std::optional<torch::stable::Tensor>& pairs, const torch::stable::Tensor& queries) {
  if (!pairs.has_value()) return;
  STD_TORCH_CHECK(pairs->scalar_type() == torch::headeronly::ScalarType::Long, "pairs: expected int64");
  STD_TORCH_CHECK(pairs->dim() == 2 && pairs->size(1) == 2, "pairs: expected shape (P, 2)");
  check_same_device("pairs", *pairs, "queries", queries);
}

void check_maxsim_gradient(const torch::stable::Tensor& grad_scores, const torch::stable::Tensor& queries,
                           const torch::stable::Tensor& query_offsets, const torch::stable::Tensor& context_offsets,
                           const std::optional<torch::stable::Tensor>& pairs) {
  if (!pairs.has_value()) {
    check_score_gradient(grad_scores, query_offsets, context_offsets);
    return;
  }
  STD_TORCH_CHECK(grad_scores.dim() == 1 && grad_scores.size(0) == pairs->size(0),
                  "grad_scores: expected one number per pair");
  check_same_device("grad_scores", grad_scores, "queries", queries);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// `precision` is the requested one, resolved in Python. A gradient that is not requested has no rows. `longest_query`,
// `longest_context`: upper bounds of the lengths of sets, for the memory of listed pairs on CUDA; 0: unknown.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "maxsim_scores(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, Tensor? pairs, "
      "str reduction, str direction, str precision) -> Tensor");
  m.def(
      "maxsim_scores_backward(Tensor grad_scores, Tensor queries, Tensor query_offsets, Tensor contexts, "
      "Tensor context_offsets, Tensor? pairs, str reduction, str direction, str precision, int longest_query, "
      "int longest_context, bool for_queries, bool for_contexts) -> (Tensor, Tensor)");
}
#endif
