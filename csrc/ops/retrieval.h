// Checks for every backend of retrieval.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace itm_fast {

// Scores must be float32 or float64, caption_image int64.
void check_retrieval(const torch::stable::Tensor& scores, const torch::stable::Tensor& caption_image);

}  // namespace itm_fast
