// Checks of a tensor's device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <string>

namespace itm_fast {

inline int32_t device_type(const torch::stable::Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

inline std::string device_name(const torch::stable::Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

// Refuses a tensor on another device than `other`. The dispatcher chooses a kernel by one of its arguments, and the
// kernel cannot use an address of another device.
inline void check_same_device(const char* name, const torch::stable::Tensor& tensor, const char* other_name,
                              const torch::stable::Tensor& other) {
  const bool same = device_type(tensor) == device_type(other) && tensor.get_device_index() == other.get_device_index();
  STD_TORCH_CHECK(same, name, ": expected it on ", device_name(other), " like ", other_name, ", got ",
                  device_name(tensor));
}

}  // namespace itm_fast
