// The memory of a launch in addition to its results, cut into arrays. Host code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace itm_fast::cuda {

// Consecutive arrays, each aligned to 16 bytes. Without memory it only computes the required size.
class Workspace {
 public:
  explicit Workspace(void* memory = nullptr) : memory_(static_cast<unsigned char*>(memory)) {}

  template <typename T>
  T* take(int64_t size) {
    T* array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (size * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  unsigned char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace itm_fast::cuda
