#include "shim/shared_memory.h"

#include <algorithm>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace itm_fast::shim {

SharedMemory::SharedMemory(const char* name, int line, size_t element_size, int64_t size)
    : name_(name),
      line_(line),
      element_size_(element_size),
      size_(size),
      bytes_(2 * kRedZone + size * element_size, kPoison),
      elements_(size) {
  ASAN_POISON_MEMORY_REGION(bytes_.data(), kRedZone);
  ASAN_POISON_MEMORY_REGION(address(size), kRedZone);
}

SharedMemory::~SharedMemory() { ASAN_UNPOISON_MEMORY_REGION(bytes_.data(), bytes_.size()); }

void SharedMemory::check_red_zones() const {
#if !defined(__SANITIZE_ADDRESS__)  // There they cannot be read, and a write to them has ended the process.
  const auto damaged = [](unsigned char byte) { return byte != kPoison; };
  if (std::any_of(bytes_.begin(), bytes_.begin() + kRedZone, damaged) ||
      std::any_of(bytes_.end() - kRedZone, bytes_.end(), damaged)) {
    fail("shared array '" + name_ + "': something was written beside it");
  }
#endif
}

// Notes an access, after a look at those of other threads that nothing puts before it.
SharedMemory::Element& SharedMemory::use(int64_t index, Kind kind) {
  const auto verb = [](Kind kind) {
    return std::string(kind == Kind::read ? "read" : kind == Kind::write ? "write" : "atomic update");
  };
  const std::string where = "shared array '" + name_ + "': ";
  if (index < 0 || index >= size_) {
    fail(where + verb(kind) + " of index " + std::to_string(index) + ", expected 0 to " + std::to_string(size_ - 1));
  }
  const Thread& now = thread();
  Element& element = elements_[index];
  if (element.awaited) {
    fail(where + verb(kind) + " of index " + std::to_string(index) + " while an asynchronous copy to it is under way");
  }
  std::vector<Access>& accesses = element.accesses;
  if (!accesses.empty() && accesses.front().barriers < now.barriers) accesses.clear();
  bool noted = false;
  for (const Access& before : accesses) {
    if (before.thread == now.index) {
      noted = noted || (before.kind == kind && before.warp_syncs == now.warp_syncs);
      continue;
    }
    const bool ordered = before.thread / kWarpSize == now.index / kWarpSize && before.warp_syncs < now.warp_syncs;
    if (!ordered && (before.kind != kind || kind == Kind::write)) {
      fail(where + "race at index " + std::to_string(index) + ", " + verb(kind) + " here and " + verb(before.kind) +
           " by thread " + std::to_string(before.thread) + " with no barrier between them");
    }
  }
  if (!noted) accesses.push_back({now.index, now.barriers, now.warp_syncs, kind});
  return element;
}

void SharedMemory::read(int64_t index, void* value) {
  if (!use(index, Kind::read).written) {
    fail("shared array '" + name_ + "': read of index " + std::to_string(index) + " before anything was written to it");
  }
  std::memcpy(value, address(index), element_size_);
}

void SharedMemory::write(int64_t index, const void* value) {
  use(index, Kind::write).written = true;
  std::memcpy(address(index), value, element_size_);
}

void* SharedMemory::update_atomically(int64_t index) {
  if (!use(index, Kind::atomic).written) {
    fail("shared array '" + name_ + "': atomic update of index " + std::to_string(index) +
         " before anything was written to it");
  }
  return address(index);
}

void SharedMemory::begin_copy(int64_t index, int64_t length, int64_t count, const void* source) {
  if (index < 0 || index + length > size_ || count < 0 || count > length) {
    fail("shared array '" + name_ + "': asynchronous copy of " + std::to_string(count) + " elements to index " +
         std::to_string(index) + ", expected 0 to " + std::to_string(length) + " elements within the " +
         std::to_string(size_) + " of the array");
  }
  if (byte_offset(index) % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
    fail("shared array '" + name_ + "': asynchronous copy to index " + std::to_string(index) +
         ", expected source and target on 16-byte boundaries");
  }
  for (int64_t i = index; i < index + length; ++i) {
    use(i, Kind::write).awaited = true;
    std::memset(address(i), kPoison, element_size_);
  }
}

void SharedMemory::finish_copy(const Copy& copy) {
  for (int64_t i = 0; i < copy.length; ++i) elements_[copy.index + i].awaited = false;
  // The write happens now, as far as other threads can tell.
  for (int64_t i = 0; i < copy.length; ++i) use(copy.index + i, Kind::write).written = true;
  const size_t bytes = copy.count * element_size_;
  if (bytes > 0) std::memcpy(address(copy.index), copy.source, bytes);
  std::memset(address(copy.index) + bytes, 0, copy.length * element_size_ - bytes);
}

}  // namespace itm_fast::shim
