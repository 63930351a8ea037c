// matching_loss on the CPU: cross_attention_scores, then the loss of the scores with its gradient.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/matching_parts.h"
#include "ops/cross_attention.h"
#include "ops/matching_loss.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> matching_loss(
    const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts, const Tensor& context_offsets,
    const std::optional<Tensor>& anchor_scores, const std::optional<Tensor>& positives, const std::string& attention,
    double temperature, const std::string& normalization, double negative_slope, const std::string& focal,
    const std::string& aggregation, double logsumexp_temperature, const std::string& precision, double margin,
    const std::string& mining, double epsilon, const std::string& selective_divisor, bool halve,
    const std::string& strategy, double alpha, bool soft, const std::string& directions, const std::string& reduction) {
  const bool transposed = queries_are_captions(attention);
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(query_offsets, context_offsets);
  Tensor scores = cross_attention_scores(queries, query_offsets, contexts, context_offsets, temperature, normalization,
                                         negative_slope, focal, aggregation, logsumexp_temperature, precision);
  if (transposed) scores = torch::stable::contiguous(torch::stable::transpose(scores, 0, 1));
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
