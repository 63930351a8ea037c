// The device and the stream of a launcher. The tests replace this file by one that launches on the CPU.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/devices.h"

namespace itm_fast::cuda {

// Makes the device of a CUDA tensor the current one for its lifetime, and holds that device's current stream. (The
// stable interface exposes streams only from torch 2.13 on.)
class DeviceStream {
 public:
  explicit DeviceStream(const torch::stable::Tensor& tensor) : guard_(device_index(tensor)) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // Runs kernel<<<blocks, threads, dynamic_bytes>>>(parameters) in the stream.
  template <typename Parameters>
  void launch(void (*kernel)(Parameters), int64_t blocks, int threads, const Parameters& parameters,
              int64_t dynamic_bytes = 0) const {
    STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "itm_fast: a matrix of this size needs ", blocks,
                    " thread blocks, more than one launch can have");
    const int bytes = static_cast<int>(dynamic_bytes);
    if (bytes > 0) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream_>>>(parameters);
    check(cudaGetLastError());
  }

  // The number of blocks of kernel that are resident at once.
  template <typename Parameters>
  int64_t resident_blocks(void (*kernel)(Parameters), int threads, int64_t dynamic_bytes) const {
    const void* function = reinterpret_cast<const void*>(kernel);
    const int bytes = static_cast<int>(dynamic_bytes);
    if (bytes > 0) check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, function, threads, bytes));
    return processors() * resident;
  }

  // Runs kernel in as many blocks as are resident at once, at most `at_most`.
  template <typename Parameters>
  void launch_together(void (*kernel)(Parameters), int64_t at_most, int threads, const Parameters& parameters,
                       int64_t dynamic_bytes = 0) const {
    const int64_t blocks = std::min(at_most, resident_blocks(kernel, threads, dynamic_bytes));
    void* arguments[] = {const_cast<Parameters*>(&parameters)};
    check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                                      dim3(threads), arguments, static_cast<int>(dynamic_bytes), stream_));
  }

  int64_t processors() const {
    int device = 0, count = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }

  void set_zero(void* memory, int64_t bytes) const { check(cudaMemsetAsync(memory, 0, bytes, stream_)); }

 private:
  static torch::stable::accelerator::DeviceIndex device_index(const torch::stable::Tensor& tensor) {
    STD_TORCH_CHECK(tensor.is_cuda(), "itm_fast: expected CUDA tensors, got one on ", device_name(tensor));
    return tensor.get_device_index();
  }

  static void check(cudaError_t error) {
    STD_TORCH_CHECK(error == cudaSuccess, "itm_fast: CUDA error: ", cudaGetErrorString(error));
  }

  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace itm_fast::cuda
