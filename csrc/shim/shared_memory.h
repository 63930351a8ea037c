// One array in shared memory: its bytes between red zones, and for every element who has used it since when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shim/block.h"

namespace itm_fast::shim {

class SharedMemory {
 public:
  SharedMemory(const char* name, int line, size_t element_size, int64_t size);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Of the running thread. Each reports an index outside of the array, a conflict with another thread, and an element
  // that an asynchronous copy is on its way to; a read also one that nothing has been written to.
  void read(int64_t index, void* value);
  void write(int64_t index, const void* value);
  void* update_atomically(int64_t index);  // the element, to be changed at once

  void begin_copy(int64_t index, int64_t length, int64_t count, const void* source);
  void finish_copy(const Copy& copy);

  // Where element 0 would be: alignments count from here.
  int64_t byte_offset(int64_t index) const { return index * static_cast<int64_t>(element_size_); }
  void check_red_zones() const;
  const std::string& name() const { return name_; }
  bool is(const std::string& name, int line) const { return line_ == line && name_ == name; }

 private:
  enum class Kind { read, write, atomic };
  struct Access {
    int thread;
    int64_t barriers, warp_syncs;
    Kind kind;
  };
  struct Element {
    std::vector<Access> accesses;  // those that another thread could conflict with
    bool written = false, awaited = false;
  };

  unsigned char* address(int64_t index) { return bytes_.data() + kRedZone + byte_offset(index); }
  Element& use(int64_t index, Kind kind);

  static constexpr int64_t kRedZone = 64;
  static constexpr unsigned char kPoison = 0xff;  // NaN in every floating point type
  const std::string name_;
  const int line_;
  const size_t element_size_;
  const int64_t size_;
  std::vector<unsigned char> bytes_;
  std::vector<Element> elements_;
};

}  // namespace itm_fast::shim
