#include "ops/regulators.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "ops/devices.h"
#include "ops/options.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum class Schedule : int32_t { interleaved, sequential };
enum class CorrespondenceInput : int32_t { alignment, query };

constexpr int64_t kUnknown = -1;  // a size that the first weight with this dimension sets

// Returns the weights one after the other.
class Reader {
 public:
  Reader(const std::vector<Tensor>& weights, const Tensor& queries) : weights_(weights), queries_(queries) {}

  // A weight of shape (outputs, inputs) and its bias (outputs,).
  LinearWeights linear(const char* name, int64_t& outputs, int64_t& inputs) {
    const Tensor weight = next(name, 2), bias = next(name, 1);
    check_size(name, "rows", weight.size(0), outputs);
    check_size(name, "columns", weight.size(1), inputs);
    check_size(name, "biases", bias.size(0), outputs);
    return {weight, bias};
  }

  // Two vectors.
  LinearWeights vectors(const char* name, int64_t& first, int64_t& second) {
    const Tensor weight = next(name, 1), bias = next(name, 1);
    check_size(name, "numbers", weight.size(0), first);
    check_size(name, "numbers", bias.size(0), second);
    return {weight, bias};
  }

  void check_end() const {
    STD_TORCH_CHECK(place_ == weights_.size(), "weights: expected ", place_, " tensors, got ", weights_.size());
  }

 private:
  const Tensor& next(const char* name, int64_t n_dimensions) {
    STD_TORCH_CHECK(place_ < weights_.size(), "weights: expected more than ", weights_.size(), " tensors");
    const Tensor& tensor = weights_[place_++];
    const ScalarType dtype = tensor.scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, name,
                    ": expected float32 or float64 weights");
    check_same_device(name, tensor, "queries", queries_);
    STD_TORCH_CHECK(tensor.dim() == n_dimensions, name, ": expected ", n_dimensions, " dimensions, got ", tensor.dim());
    return tensor;
  }

  static void check_size(const char* name, const char* what, int64_t size, int64_t& expected) {
    if (expected == kUnknown) expected = size;
    STD_TORCH_CHECK(size == expected, name, ": expected ", expected, " ", what, ", got ", size);
  }

  const std::vector<Tensor>& weights_;
  const Tensor& queries_;
  size_t place_ = 0;
};

}  // namespace

RegulatorOptions regulator_options(const RegulatorSetting& setting, const CrossAttentionOptions& attention) {
  using namespace std::string_view_literals;
  STD_TORCH_CHECK(attention.focal != Focal::hard, "focal: unknown option 'hard'");
  RegulatorOptions options{};
  options.attention = attention;
  options.n_alignments = setting.alignments;
  options.n_correspondences = setting.correspondences;
  options.n_aggregations = setting.aggregations;
  options.scored = setting.scored;
  options.learned_factors = setting.learned_factors;
  options.normalize_mean = setting.normalize_mean;
  options.normalize_attended = setting.normalize_attended;
  options.normalize_guidance = setting.normalize_guidance;
  options.residual_correspondence = setting.residual_correspondence;
  options.residual_aggregation = setting.residual_aggregation;
  options.activation = parse_option<Activation>("activation", setting.activation, std::array{"sigmoid"sv, "tanh"sv});
  const auto schedule =
      parse_option<Schedule>("schedule", setting.schedule, std::array{"interleaved"sv, "sequential"sv});
  options.interleaved = schedule == Schedule::interleaved && setting.correspondences > 0 && setting.aggregations > 0;
  options.sees_query =
      parse_option<CorrespondenceInput>("correspondence_input", setting.correspondence_input,
                                        std::array{"alignment"sv, "query"sv}) == CorrespondenceInput::query;
  for (const int64_t count : {setting.alignments, setting.correspondences, setting.aggregations}) {
    STD_TORCH_CHECK(count >= 0, "steps: expected no negative number, got ", count);
  }
  STD_TORCH_CHECK(options.scored || options.n_aggregations == 0, "aggregations: expected a score with them");
  const int64_t without_score = options.sees_query ? 0 : options.n_correspondences;
  const int64_t expected = options.scored ? options.n_correspondences + 1 : without_score;
  STD_TORCH_CHECK(options.n_alignments == expected, "alignments: expected ", expected, ", got ", options.n_alignments);
  STD_TORCH_CHECK(!options.interleaved || options.n_aggregations == options.n_alignments, "aggregations: expected ",
                  options.n_alignments, ", got ", options.n_aggregations);
  return options;
}

RegulatorOptions alignment_options(int64_t correspondences, bool residual, const CrossAttentionOptions& attention) {
  RegulatorOptions options = regulator_options({correspondences + 1, correspondences, 0, true, false, "sigmoid", false,
                                                true, true, "interleaved", residual, false, "alignment"},
                                               attention);
  options.scored = false;
  return options;
}

CounterDropout counter_dropout(double probability, const std::optional<Tensor>& seed, const Tensor& queries) {
  STD_TORCH_CHECK(probability >= 0.0 && probability < 1.0, "dropout: expected a probability in [0, 1), got ",
                  probability);
  CounterDropout dropout{probability, static_cast<uint64_t>(std::floor(probability * 4294967296.0)), {0, 0}};
  if (probability == 0.0) return dropout;
  STD_TORCH_CHECK(seed.has_value(), "seed: expected one for the dropout of ", probability);
  STD_TORCH_CHECK(seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                  "seed: expected an int64 tensor of one element");
  check_same_device("seed", *seed, "queries", queries);
  return dropout;
}

RegulatorWeights regulator_weights(const std::vector<Tensor>& weights, const RegulatorOptions& options,
                                   const Tensor& queries) {
  Reader reader(weights, queries);
  int64_t dim = queries.size(1);
  RegulatorWeights result;
  int64_t width = kUnknown, one = 1;
  for (int64_t i = 0; i < options.n_alignments; ++i) {
    result.alignments.push_back(reader.linear("alignments", width, dim));
  }
  for (int64_t i = 0; i < options.n_correspondences; ++i) {
    int64_t wide = kUnknown, narrow = kUnknown, &seen = options.sees_query ? dim : width;
    CorrespondenceWeights step;
    step.w1 = reader.linear("correspondences.w1", wide, seen);
    step.w2 = reader.linear("correspondences.w2", dim, wide);
    step.w3 = reader.linear("correspondences.w3", narrow, seen);
    step.w4 = reader.linear("correspondences.w4", one, narrow);
    result.hidden = std::max({result.hidden, wide, narrow});
    result.correspondences.push_back(step);
  }
  for (int64_t i = 0; i < options.n_aggregations; ++i) {
    AggregationWeights step;
    step.a = reader.linear("aggregations.a", width, width);
    step.b = reader.linear("aggregations.b", width, width);
    step.v = reader.linear("aggregations.v", one, width);
    result.aggregations.push_back(step);
  }
  if (options.scored) result.score = reader.linear("score", one, width);
  if (options.learned_factors) result.factors = reader.vectors("initial_factors", dim, one);
  reader.check_end();
  result.width = std::max<int64_t>(width, 0);
  return result;
}

void check_alignment_gradient(const Tensor& grad_alignments, const Tensor& queries, const Tensor& context_offsets,
                              const RegulatorWeights& weights) {
  check_same_device("grad_alignments", grad_alignments, "queries", queries);
  STD_TORCH_CHECK(grad_alignments.dim() == 3 && grad_alignments.size(0) == context_offsets.size(0) - 1 &&
                      grad_alignments.size(1) == queries.size(0) && grad_alignments.size(2) == weights.width,
                  "grad_alignments: expected shape (context sets, query rows, width)");
}

}  // namespace itm_fast

#ifndef ITM_FAST_WITHOUT_SCHEMAS  // Only one library may define them.
// `weights` has the order of `RegulatorParameters.tensors()`, in float32, or float64 for float64 rows; `precision` is
// the requested one, resolved in Python. The backwards return the gradients of queries, contexts and weights, and the
// number of recomputed pairs, int64, one element. The gradients of all weights lie one after the other in one vector.
// `longest_query`, `longest_context`: the lengths of the longest sets, for the workspace on CUDA; 0: unknown. Pairs of
// sets that are longer than the workspace allows are NaN, and so are all gradients if such a pair has one.
STABLE_TORCH_LIBRARY_FRAGMENT(itm_fast, m) {
  m.def(
      "regulated_scores(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "Tensor[] weights, int alignments, int correspondences, int aggregations, bool scored, bool learned_factors, "
      "str activation, bool normalize_mean, bool normalize_attended, bool normalize_guidance, str schedule, "
      "bool residual_correspondence, bool residual_aggregation, str correspondence_input, float temperature, "
      "float negative_slope, str focal, float dropout, Tensor? seed, str precision, "
      "int longest_query=0, int longest_context=0) -> Tensor");
  m.def(
      "regulated_scores_backward(Tensor grad_scores, Tensor queries, Tensor query_offsets, Tensor contexts, "
      "Tensor context_offsets, Tensor[] weights, int alignments, int correspondences, int aggregations, bool scored, "
      "bool learned_factors, str activation, bool normalize_mean, bool normalize_attended, bool normalize_guidance, "
      "str schedule, bool residual_correspondence, bool residual_aggregation, str correspondence_input, "
      "float temperature, float negative_slope, str focal, float dropout, Tensor? seed, str precision, "
      "int longest_query=0, int longest_context=0) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cross_attention_alignments(Tensor queries, Tensor query_offsets, Tensor contexts, Tensor context_offsets, "
      "Tensor[] weights, int correspondences, bool residual_correspondence, float temperature, str normalization, "
      "float negative_slope, str focal, str precision, int longest_query=0, int longest_context=0) -> Tensor");
  m.def(
      "cross_attention_alignments_backward(Tensor grad_alignments, Tensor queries, Tensor query_offsets, "
      "Tensor contexts, Tensor context_offsets, Tensor[] weights, int correspondences, bool residual_correspondence, "
      "float temperature, str normalization, float negative_slope, str focal, str precision, int longest_query=0, "
      "int longest_context=0) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}
#endif
