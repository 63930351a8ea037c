// Shared by the forward and the backward of cross_attention_scores on CUDA: dense operands.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include "cuda/launch.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/set_tiles.h"

namespace itm_fast::cuda {

template <typename S>
struct Operand {
  Operand(const torch::stable::Tensor& values, const torch::stable::Tensor& offsets)
      : values(torch::stable::contiguous(values)), offsets(torch::stable::contiguous(offsets)) {}

  SetRows<S> rows() const {
    return {data_of<S>(values), offsets.const_data_ptr(), offsets.scalar_type() == torch::headeronly::ScalarType::Long,
            offsets.size(0) - 1, values.size(0)};
  }

  torch::stable::Tensor values, offsets;
};

// Calls run(S{}) with the storage type of the rows.
template <typename Run>
auto with_rows(torch::headeronly::ScalarType dtype, const Run& run) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(dtype != ScalarType::Double, "queries: no CUDA kernel computes cross attention in float64");
  if (dtype == ScalarType::BFloat16) return run(BFloat16{});
  if (dtype == ScalarType::Half) return run(Half{});
  return run(float{});
}

}  // namespace itm_fast::cuda
