// Uninitialised scratch memory on cache-line boundaries.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace itm_fast {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(::operator new[](static_cast<size_t>(size) * sizeof(T), kAlignment))) {}

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(T* pointer) const { ::operator delete[](pointer, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
};

}  // namespace itm_fast
