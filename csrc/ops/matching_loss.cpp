#include "ops/matching_loss.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <string_view>

#include "ops/options.h"

namespace itm_fast {

MatchingAttention matching_attention(const std::string& attention) {
  using namespace std::string_view_literals;
  return parse_option<MatchingAttention>("attention", attention, std::array{"t2i"sv, "i2t"sv, "sum"sv, "mean"sv});
}

void check_pairs(const torch::stable::Tensor& query_offsets, const torch::stable::Tensor& context_offsets) {
  STD_TORCH_CHECK(query_offsets.size(0) == context_offsets.size(0), "contexts: expected ", query_offsets.size(0) - 1,
                  " sets like the queries, got ", context_offsets.size(0) - 1);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// The results: the loss, the scores (images, captions), the second result of the loss, and the gradient of the scores
// for an incoming gradient of 1. The loss is boosting_loss if there are anchor scores, else triplet_loss; options of
// the other one have no effect. Options that start with "other_" are those of the scores of contexts that attend to
// queries, and have no effect with attention "t2i" or "i2t".
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "matching_loss(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "Tensor? anchor_scores, Tensor? positives, str attention, float temperature, str normalization, "
      "float negative_slope, str focal, str aggregation, float logsumexp_temperature, str precision, "
      "float other_temperature, str other_normalization, float other_negative_slope, str other_focal, "
      "str other_aggregation, float other_logsumexp_temperature, float margin, "
      "str mining, float epsilon, str selective_divisor, bool halve, str strategy, float alpha, bool soft, "
      "str directions, str reduction) -> (Tensor, Tensor, Tensor, Tensor)");
}
#endif
