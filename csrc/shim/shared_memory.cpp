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

SharedMemory::Storage::Storage(size_t unit_size, int64_t size)
    : unit_size(unit_size), bytes(2 * kRedZone + unit_size * size, kPoison), units(size) {
  ASAN_POISON_MEMORY_REGION(bytes.data(), kRedZone);
  ASAN_POISON_MEMORY_REGION(bytes.data() + bytes.size() - kRedZone, kRedZone);
}

SharedMemory::Storage::~Storage() { ASAN_UNPOISON_MEMORY_REGION(bytes.data(), bytes.size()); }

SharedMemory::SharedMemory(const char* name, int line, size_t element_size, int64_t size)
    : name_(name),
      line_(line),
      element_size_(element_size),
      size_(size),
      storage_(std::make_shared<Storage>(element_size, size)) {}

SharedMemory::SharedMemory(const char* name, const SharedMemory& whole, int64_t offset, size_t element_size,
                           int64_t size, int id)
    : name_(name),
      line_(0),
      element_size_(element_size),
      size_(size),
      offset_(offset),
      id_(id),
      storage_(whole.storage_) {
  const int64_t held = whole.size_ * static_cast<int64_t>(whole.element_size_);
  if (offset < 0 || size < 0 || byte_offset(size) > held || offset % static_cast<int64_t>(element_size) != 0 ||
      element_size % whole.element_size_ != 0) {
    fail("shared array '" + name_ + "': bytes " + std::to_string(offset) + " to " + std::to_string(byte_offset(size)) +
         " of the dynamic shared memory, of which there are " + std::to_string(held));
  }
}

void SharedMemory::check_red_zones() const {
#if !defined(__SANITIZE_ADDRESS__)  // There, a read is an error, and a write has already ended the process.
  const auto damaged = [](unsigned char byte) { return byte != kPoison; };
  const std::vector<unsigned char>& bytes = storage_->bytes;
  if (std::any_of(bytes.begin(), bytes.begin() + kRedZone, damaged) ||
      std::any_of(bytes.end() - kRedZone, bytes.end(), damaged)) {
    fail("shared array '" + name_ + "': something was written beside it");
  }
#endif
}

// Records an access after comparing it with unordered accesses of other threads.
void SharedMemory::use(int64_t index, Kind kind) {
  if (index < 0 || index >= size_) {
    fail("shared array '" + name_ + "': " + verb(kind) + " of index " + std::to_string(index) + ", expected 0 to " +
         std::to_string(size_ - 1));
  }
  Unit* units = units_of(index);
  for (size_t i = 0; i < units_per_element(); ++i) use_unit(units[i], index, kind);
}

void SharedMemory::use_unit(Unit& unit, int64_t index, Kind kind) {
  const Thread& now = thread();
  if (unit.awaited) {
    fail("shared array '" + name_ + "': " + verb(kind) + " of index " + std::to_string(index) +
         " while an asynchronous copy to it is under way");
  }
  std::vector<Access>& accesses = unit.accesses;
  if (!accesses.empty() && accesses.front().barriers < now.barriers) accesses.clear();
  bool noted = false;
  for (const Access& before : accesses) {
    if (before.thread == now.index) {
      noted = noted || (before.kind == kind && before.warp_syncs == now.warp_syncs);
      continue;
    }
    const bool ordered = before.thread / kWarpSize == now.index / kWarpSize && before.warp_syncs < now.warp_syncs;
    if (!ordered && (before.kind != kind || kind == Kind::write)) {
      fail("shared array '" + name_ + "': race at index " + std::to_string(index) + ", " + verb(kind) + " here and " +
           verb(before.kind) + " by thread " + std::to_string(before.thread) + " with no barrier between them");
    }
  }
  if (!noted) accesses.push_back({now.index, now.barriers, now.warp_syncs, kind});
}

std::string SharedMemory::verb(Kind kind) {
  return kind == Kind::read ? "read" : kind == Kind::write ? "write" : "atomic update";
}

void SharedMemory::mark_written(int64_t index) {
  Unit* units = units_of(index);
  for (size_t i = 0; i < units_per_element(); ++i) units[i].written_by = id_;
}

bool SharedMemory::was_written(int64_t index) {
  const Unit* units = units_of(index);
  return std::all_of(units, units + units_per_element(), [&](const Unit& unit) { return unit.written_by == id_; });
}

void SharedMemory::read(int64_t index, void* value) {
  use(index, Kind::read);
  if (!was_written(index)) {
    fail("shared array '" + name_ + "': read of index " + std::to_string(index) + " before anything was written to it");
  }
  std::memcpy(value, address(index), element_size_);
}

void SharedMemory::write(int64_t index, const void* value) {
  use(index, Kind::write);
  mark_written(index);
  std::memcpy(address(index), value, element_size_);
}

void* SharedMemory::update_atomically(int64_t index) {
  use(index, Kind::atomic);
  if (!was_written(index)) {
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
    use(i, Kind::write);
    for (size_t part = 0; part < units_per_element(); ++part) units_of(i)[part].awaited = true;
    std::memset(address(i), kPoison, element_size_);
  }
}

void SharedMemory::finish_copy(const Copy& copy) {
  for (int64_t i = copy.index; i < copy.index + copy.length; ++i) {
    for (size_t part = 0; part < units_per_element(); ++part) units_of(i)[part].awaited = false;
    use(i, Kind::write);  // To the other threads, the write happens now.
    mark_written(i);
  }
  const size_t bytes = copy.count * element_size_;
  if (bytes > 0) std::memcpy(address(copy.index), copy.source, bytes);
  std::memset(address(copy.index) + bytes, 0, copy.length * element_size_ - bytes);
}

}  // namespace itm_fast::shim
