// Checks and options for every backend of matching_loss.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

namespace itm_fast {

// Whether the queries are captions ("t2i"), so that scores of images as rows are those of the attention transposed.
bool queries_are_captions(const std::string& attention);

// Refuses different numbers of query sets and context sets: pair i of both is positive.
void check_pairs(const torch::stable::Tensor& query_offsets, const torch::stable::Tensor& context_offsets);

}  // namespace itm_fast
