// Shared by cross_attention_scores and maxsim_scores on CUDA, forward and backward: dense operands.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include "cuda/launch.h"
#include "itm_fast/cuda/elements.h"
#include "itm_fast/cuda/set_tiles.h"
#include "itm_fast/cuda/tile_product.h"

namespace itm_fast::cuda {

inline void check_width(const torch::stable::Tensor& values) {
  STD_TORCH_CHECK(values.size(1) <= kWidestRow, "queries: the CUDA kernels take rows of at most ", kWidestRow,
                  " numbers, got ", values.size(1));
}

template <typename S>
struct Operand {
  Operand(const torch::stable::Tensor& values, const torch::stable::Tensor& offsets)
      : values(torch::stable::contiguous(values)), offsets(torch::stable::contiguous(offsets)) {
    check_width(values);
  }

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
  STD_TORCH_CHECK(dtype != ScalarType::Double,
                  "queries: the CUDA kernels take float32, bfloat16 or float16 rows, got float64");
  if (dtype == ScalarType::BFloat16) return run(BFloat16{});
  if (dtype == ScalarType::Half) return run(Half{});
  return run(float{});
}

}  // namespace itm_fast::cuda
