// matching_loss on the CPU: cross_attention_scores of one direction or both, then the loss of the scores with its
// gradient.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/matching_parts.h"
#include "ops/cross_attention.h"
#include "ops/matching_loss.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

constexpr int64_t kScoresPerThread = 1 << 15;

// Adds scores of the same shape, dense, and multiplies the sums by `weight`.
template <typename T>
void add_scores(Tensor& scores, const Tensor& others, T weight) {
  T* sums = static_cast<T*>(scores.mutable_data_ptr());
  const T* added = static_cast<const T*>(others.const_data_ptr());
  torch::stable::parallel_for(0, scores.numel(), kScoresPerThread, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sums[i] = weight * (sums[i] + added[i]);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> matching_loss(
    const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts, const Tensor& context_offsets,
    const std::optional<Tensor>& anchor_scores, const std::optional<Tensor>& positives, const std::string& attention,
    double temperature, const std::string& normalization, double negative_slope, const std::string& focal,
    const std::string& aggregation, double logsumexp_temperature, const std::string& precision,
    double other_temperature, const std::string& other_normalization, double other_negative_slope,
    const std::string& other_focal, const std::string& other_aggregation, double other_logsumexp_temperature,
    double margin, const std::string& mining, double epsilon, const std::string& selective_divisor, bool halve,
    const std::string& strategy, double alpha, bool soft, const std::string& directions, const std::string& reduction) {
  const MatchingAttention attending = matching_attention(attention);
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(query_offsets, context_offsets);
  Tensor scores = cross_attention_scores(queries, query_offsets, contexts, context_offsets, temperature, normalization,
                                         negative_slope, focal, aggregation, logsumexp_temperature, precision);
  if (queries_are_captions(attending)) scores = torch::stable::contiguous(torch::stable::transpose(scores, 0, 1));
  if (has_both_directions(attending)) {
    const Tensor others = cross_attention_scores(contexts, context_offsets, queries, query_offsets, other_temperature,
                                                 other_normalization, other_negative_slope, other_focal,
                                                 other_aggregation, other_logsumexp_temperature, precision);
    is_double(scores) ? add_scores<double>(scores, others, weight_of_both(attending))
                      : add_scores<float>(scores, others, weight_of_both(attending));
  }
  if (anchor_scores) {
    const auto [loss, negatives, gradient] = boosting_loss_with_gradient(
        scores, *anchor_scores, positives, strategy, mining, margin, alpha, soft, directions, reduction);
    return {loss, scores, negatives, gradient};
  }
  const auto [loss, negatives, gradient, unused] = triplet_loss_with_gradient(
      scores, positives, std::nullopt, margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  return {loss, scores, negatives, gradient};
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) { m.impl("matching_loss", TORCH_BOX(&itm_fast::matching_loss)); }
