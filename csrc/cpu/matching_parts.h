// The operators on the CPU that matching_loss calls.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace itm_fast {

// The lengths of the longest sets have no effect on a CPU.
torch::stable::Tensor cross_attention_scores(
    const torch::stable::Tensor& queries, const torch::stable::Tensor& query_offsets,
    const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets, double temperature,
    const std::string& normalization, double negative_slope, const std::string& focal, const std::string& aggregation,
    double logsumexp_temperature, const std::string& precision, int64_t longest_query = 0, int64_t longest_context = 0);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>
triplet_loss_with_gradient(const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& positives,
                           const std::optional<torch::stable::Tensor>& positive_scores, double margin,
                           const std::string& mining, double epsilon, const std::string& selective_divisor, bool halve,
                           const std::string& directions, const std::string& reduction);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> boosting_loss_with_gradient(
    const torch::stable::Tensor& scores, const torch::stable::Tensor& anchor_scores,
    const std::optional<torch::stable::Tensor>& positives, const std::string& strategy, const std::string& mining,
    double margin, double alpha, bool soft, const std::string& directions, const std::string& reduction);

}  // namespace itm_fast
