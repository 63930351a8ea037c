#include "ops/cross_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <string_view>

#include "ops/devices.h"
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
  options.focal = parse_option<Focal>("focal", focal, std::array{"none"sv, "equal"sv, "prob"sv, "hard"sv});
  options.aggregation =
      parse_option<Aggregation>("aggregation", aggregation, std::array{"mean"sv, "sum"sv, "max"sv, "logsumexp"sv});
  return options;
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_fragments(const char* name, const Tensor& values, const Tensor& offsets) {
  STD_TORCH_CHECK(values.dim() == 2, name, ": expected values of shape (N, d), got ", values.dim(), " dimensions");
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) >= 1, name, ": expected offsets of shape (n_sets + 1,)");
  const ScalarType dtype = values.scalar_type(), offset_dtype = offsets.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  name, ": expected float32, float64, bfloat16 or float16 values");
  STD_TORCH_CHECK(offset_dtype == ScalarType::Int || offset_dtype == ScalarType::Long, name,
                  ": expected int32 or int64 offsets");
}

enum class Precision : int32_t { float64, float32, bf16x3, bf16, fp16 };

}  // namespace

void check_operands(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                    const Tensor& context_offsets, const std::string& precision) {
  using namespace std::string_view_literals;
  check_fragments("queries", queries, query_offsets);
  check_fragments("contexts", contexts, context_offsets);
  STD_TORCH_CHECK(queries.size(1) == contexts.size(1), "contexts: expected width ", queries.size(1),
                  " like the queries, got ", contexts.size(1));
  STD_TORCH_CHECK(queries.scalar_type() == contexts.scalar_type(), "contexts: expected the dtype of the queries");
  check_same_device("query_offsets", query_offsets, "queries", queries);
  check_same_device("contexts", contexts, "queries", queries);
  check_same_device("context_offsets", context_offsets, "queries", queries);
  parse_option<Precision>("precision", precision, std::array{"float64"sv, "float32"sv, "bf16x3"sv, "bf16"sv, "fp16"sv});
}

void check_contexts(const Tensor& contexts, const Tensor& context_offsets) {
  check_fragments("contexts", contexts, context_offsets);
  check_same_device("context_offsets", context_offsets, "contexts", contexts);
}

void check_grams(const Tensor& grams, const Tensor& contexts) {
  const bool is_double = contexts.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(grams.dim() == 1, "grams: expected shape (n,), got ", grams.dim(), " dimensions");
  STD_TORCH_CHECK(grams.scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float), "grams: expected ",
                  is_double ? "float64" : "float32", " values for these contexts");
  check_same_device("grams", grams, "contexts", contexts);
}

void check_score_gradient(const Tensor& grad_scores, const Tensor& query_offsets, const Tensor& context_offsets) {
  STD_TORCH_CHECK(grad_scores.dim() == 2 && grad_scores.size(0) == query_offsets.size(0) - 1 &&
                      grad_scores.size(1) == context_offsets.size(0) - 1,
                  "grad_scores: expected shape (query sets, context sets)");
  check_same_device("grad_scores", grad_scores, "query_offsets", query_offsets);
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// `precision` is the requested one, resolved in Python. The third result of the backward is the number of recomputed
// pairs, int64, one element. A gradient that `for_queries` or `for_contexts` does not request has no rows.
// `longest_query`, `longest_context`: the lengths of the longest sets, for the workspace on CUDA; 0: unknown. If they
// are wrong, only speed, memory and rounding change.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "cross_attention_scores(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "float temperature, str normalization, float negative_slope, str focal, str aggregation, "
      "float logsumexp_temperature, str precision, int longest_query=0, int longest_context=0) -> Tensor");
  // `grams`: the result of cross_attention_grams for the contexts, Gram matrices in the layout of the kernels.
  m.def(
      "cross_attention_scores_prepared(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "Tensor grams, float temperature, str normalization, float negative_slope, str focal, str aggregation, "
      "float logsumexp_temperature, str precision) -> Tensor");
  m.def("cross_attention_grams(Tensor contexts, Tensor context_offsets) -> Tensor");
  m.def(
      "cross_attention_scores_backward(Tensor grad_scores, Tensor queries, Tensor query_offsets, Tensor contexts, "
      "Tensor context_offsets, float temperature, str normalization, float negative_slope, str focal, "
      "str aggregation, float logsumexp_temperature, str precision, bool for_queries, bool for_contexts, "
      "int longest_query=0, int longest_context=0) -> (Tensor, Tensor, Tensor)");
}
#endif
