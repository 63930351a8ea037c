// Checks and options for every backend of matching_loss.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

namespace itm_fast {

// Which attention gives the scores. "sum" and "mean" combine both directions: queries attend to contexts as in "t2i",
// and contexts to queries.
enum class MatchingAttention : int32_t { t2i, i2t, sum, mean };

MatchingAttention matching_attention(const std::string& attention);

constexpr bool has_both_directions(MatchingAttention attention) {
  return attention == MatchingAttention::sum || attention == MatchingAttention::mean;
}
// Whether the queries are captions, so that scores of images as rows are those of the attention transposed.
constexpr bool queries_are_captions(MatchingAttention attention) { return attention != MatchingAttention::i2t; }
// The factor of the sum of the scores of both directions.
constexpr float weight_of_both(MatchingAttention attention) {
  return attention == MatchingAttention::mean ? 0.5f : 1.0f;
}

// Refuses different numbers of query sets and context sets: pair i of both is positive.
void check_pairs(const torch::stable::Tensor& query_offsets, const torch::stable::Tensor& context_offsets);

}  // namespace itm_fast
