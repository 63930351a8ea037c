// One array in shared memory: its bytes between red zones, and the accesses to each element. Arrays in dynamic shared
// memory are views of one such array, and may overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shim/block.h"

namespace itm_fast::shim {

class SharedMemory {
 public:
  SharedMemory(const char* name, int line, size_t element_size, int64_t size);
  // A view that begins `offset` bytes into another array. It reads values written through it, or through a view with
  // the same name and offset; all other values count as uninitialised.
  SharedMemory(const char* name, const SharedMemory& whole, int64_t offset, size_t element_size, int64_t size, int id);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Accesses of the running thread. Each reports an index outside of the array, a conflict with another thread, and an
  // element with a pending asynchronous copy. A read also reports an uninitialised element.
  void read(int64_t index, void* value);
  void write(int64_t index, const void* value);
  void* update_atomically(int64_t index);  // the element, for an immediate change

  void begin_copy(int64_t index, int64_t length, int64_t count, const void* source);
  void finish_copy(const Copy& copy);

  // Counted from the start of the memory, as alignments are.
  int64_t byte_offset(int64_t index) const { return offset_ + index * static_cast<int64_t>(element_size_); }
  void check_red_zones() const;
  const std::string& name() const { return name_; }
  bool is(const std::string& name, int line) const { return line_ == line && name_ == name; }
  bool is(const std::string& name, int64_t offset, size_t element_size, int64_t size) const {
    return line_ == 0 && name_ == name && offset_ == offset && element_size_ == element_size && size_ == size;
  }

 private:
  enum class Kind { read, write, atomic };
  struct Access {
    int thread;
    int64_t barriers, warp_syncs;
    Kind kind;
  };
  struct Unit {                    // an element, or the part of one that views share
    std::vector<Access> accesses;  // accesses that may conflict with those of another thread
    int written_by = 0;            // the view that wrote it; 0: none
    bool awaited = false;
  };
  struct Storage {
    Storage(size_t unit_size, int64_t size);
    ~Storage();
    unsigned char* address(int64_t offset) { return bytes.data() + kRedZone + offset; }

    const size_t unit_size;
    std::vector<unsigned char> bytes;
    std::vector<Unit> units;
  };

  unsigned char* address(int64_t index) { return storage_->address(byte_offset(index)); }
  Unit* units_of(int64_t index) { return storage_->units.data() + byte_offset(index) / storage_->unit_size; }
  size_t units_per_element() const { return element_size_ / storage_->unit_size; }
  static std::string verb(Kind kind);
  void use(int64_t index, Kind kind);
  void use_unit(Unit& unit, int64_t index, Kind kind);
  void mark_written(int64_t index);
  bool was_written(int64_t index);

  static constexpr int64_t kRedZone = 64;
  static constexpr unsigned char kPoison = 0xff;  // NaN in every floating point type
  const std::string name_;
  const int line_;  // 0: a view
  const size_t element_size_;
  const int64_t size_;
  const int64_t offset_ = 0;
  const int id_ = 1;
  const std::shared_ptr<Storage> storage_;
};

}  // namespace itm_fast::shim
