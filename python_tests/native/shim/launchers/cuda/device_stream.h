// csrc/cuda/device_stream.h on the CPU: launches run immediately in the shim, and the operators are registered for
// an otherwise unused device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "shim/block.h"

// A torch with CUDA keeps its own kernels.
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) _STABLE_TORCH_LIBRARY_IMPL(ns, PrivateUse1, m, C10_UID)

namespace itm_fast::cuda {

inline int64_t launches = 0, fills = 0;

// The numbers of launches and of fills with zeros so far.
extern "C" __attribute__((used, visibility("default"))) inline int64_t itm_fast_launches() { return launches; }
extern "C" __attribute__((used, visibility("default"))) inline int64_t itm_fast_fills() { return fills; }

class DeviceStream {
 public:
  explicit DeviceStream(const torch::stable::Tensor&) {}

  template <typename Parameters>
  void launch(void (*kernel)(Parameters), int64_t blocks, int threads, const Parameters& parameters,
              int64_t dynamic_bytes = 0) const {
    check(blocks, threads, dynamic_bytes);
    check(shim::launch(blocks, threads, kSeed, [&] { kernel(parameters); }, dynamic_bytes));
  }

  template <typename Parameters>
  int64_t resident_blocks(void (*)(Parameters), int, int64_t) const {
    return processors();
  }

  template <typename Parameters>
  void launch_together(void (*kernel)(Parameters), int64_t at_most, int threads, const Parameters& parameters,
                       int64_t dynamic_bytes = 0) const {
    const int64_t blocks = std::min(at_most, processors());
    check(blocks, threads, dynamic_bytes);
    check(shim::launch_together(blocks, threads, kSeed, [&] { kernel(parameters); }, dynamic_bytes));
  }

  int64_t processors() const { return 3; }

  void set_zero(void* memory, int64_t bytes) const {
    ++fills;
    if (bytes > 0) std::memset(memory, 0, bytes);
  }

 private:
  static constexpr uint64_t kSeed = 7;

  // Supported by every GPU since compute capability 8.0.
  static void check(int64_t blocks, int threads, int64_t dynamic_bytes) {
    ++launches;
    STD_TORCH_CHECK(blocks > 0 && blocks <= 0x7fffffff, "a grid of ", blocks, " blocks");
    STD_TORCH_CHECK(threads > 0 && threads <= 1024 && threads % 32 == 0, "blocks of ", threads, " threads");
    STD_TORCH_CHECK(dynamic_bytes <= 99 * 1024, dynamic_bytes, " bytes of shared memory");
  }
  static void check(const std::string& problem) { STD_TORCH_CHECK(problem.empty(), problem); }
};

}  // namespace itm_fast::cuda
