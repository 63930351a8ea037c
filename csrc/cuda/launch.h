// Shared by all launchers: the device and stream of a tensor, and scratch memory from torch's allocator.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "cuda/device_stream.h"

namespace itm_fast::cuda {

inline torch::stable::Tensor scratch(const torch::stable::Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
}

// The elements of a dense tensor, or null.
template <typename T>
const T* data_of(const torch::stable::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
const T* data_of(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? data_of<T>(*tensor) : nullptr;
}
template <typename T>
T* mutable_data_of(const torch::stable::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace itm_fast::cuda
