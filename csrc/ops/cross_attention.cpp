#include "ops/cross_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <string_view>

#include "ops/options.h"

namespace itm_fast {
CrossAttentionOptions cross_attention_options(double temperature, const std::string& normalization,
                                              double negative_slope, const std::string& focal,
                                              const std::string& aggregation, double logsumexp_temperature) {
  using namespace std::string_view_literals;
  CrossAttentionOptions options;
  options.temperature = temperature;
  options.negative_slope = negative_slope;
  options.logsumexp_temperature = logsumexp_temperature;
  options.normalization = parse_option<Normalization>("normalization", normalization,
                                                      std::array{"clipped_l2norm"sv, "l2norm"sv, "clipped_l1norm"sv,
                                                                 "l1norm"sv, "softmax"sv, "clipped"sv, "no_norm"sv});
  options.focal = parse_option<Focal>("focal", focal, std::array{"none"sv, "equal"sv, "prob"sv});
  options.aggregation =
      parse_option<Aggregation>("aggregation", aggregation, std::array{"mean"sv, "sum"sv, "max"sv, "logsumexp"sv});
  return options;
}

void check_fragments(const char* name, const torch::stable::Tensor& values, const torch::stable::Tensor& offsets) {
  STD_TORCH_CHECK(values.dim() == 2, name, ": expected values of shape (N, d), got ", values.dim(), " dimensions");
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) >= 1, name, ": expected offsets of shape (n_sets + 1,)");
}

void check_same_width(const torch::stable::Tensor& queries, const torch::stable::Tensor& contexts) {
  STD_TORCH_CHECK(queries.size(1) == contexts.size(1), "contexts: expected width ", queries.size(1),
                  " like the queries, got ", contexts.size(1));
  STD_TORCH_CHECK(queries.scalar_type() == contexts.scalar_type(), "contexts: expected the dtype of the queries");
}

}  // namespace itm_fast

// `precision` is "float64", "float32", "bf16x3", "bf16" or "fp16": what was asked for, as resolved in Python. The third
// result of the backward is the number of pairs that it recomputed, int64, one element.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "cross_attention_scores(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "float temperature, str normalization, float negative_slope, str focal, str aggregation, "
      "float logsumexp_temperature, str precision) -> Tensor");
  m.def(
      "cross_attention_scores_backward(Tensor grad_scores, Tensor queries, Tensor query_offsets, Tensor contexts, "
      "Tensor context_offsets, float temperature, str normalization, float negative_slope, str focal, "
      "str aggregation, float logsumexp_temperature, str precision) -> (Tensor, Tensor, Tensor)");
}
