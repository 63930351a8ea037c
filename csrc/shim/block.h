// Runs a kernel on the CPU, one block after another or all together, with every thread of a block as a fiber. See
// docs/internals/shim.md.
//
// A fiber runs until it waits for others (a barrier, a collective operation of its warp) or ends. A generator with a
// given seed draws the next fiber and the order of the blocks. An invalid operation ends the launch with an error
// message.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace itm_fast::shim {

inline constexpr int kWarpSize = 32;

class SharedMemory;

struct Copy {  // of copy_async: `count` elements of `source`, then zeros up to `length`
  SharedMemory* target;
  int64_t index, count, length;
  const void* source;
};

// State of the running thread that the parts of the shim share.
struct Thread {
  int index;
  int64_t barriers = 0, warp_syncs = 0, warp_operations = 0;  // how many it has passed
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> groups;  // closed groups that nothing has waited for, oldest first
};

enum class Operation { none, barrier, warp_sync, shuffle, vote, load_matrix, mma };

// Calls body() once for every thread of every block, with `dynamic_bytes` of dynamic shared memory per block. Returns
// the first error, or an empty string.
std::string launch(int64_t n_blocks, int n_threads, uint64_t seed, const std::function<void()>& body,
                   int64_t dynamic_bytes = 0);

// Seeds of launch_together from here on let a block run until it waits for those behind it, in an order that the seed
// draws. Blocks then pass a barrier as far apart as possible.
inline constexpr uint64_t kInOrder = uint64_t{1} << 32;

// The same with the threads of all blocks running together, for kernels with a grid barrier.
std::string launch_together(int64_t n_blocks, int n_threads, uint64_t seed, const std::function<void()>& body,
                            int64_t dynamic_bytes = 0);

// For use inside a kernel:

Thread& thread();
int64_t block();
int64_t grid_size();
int block_size();

// Ends the launch with a message that names the thread and the block.
[[noreturn]] void fail(const std::string& message);

// Waits until all threads of the block, or of the warp, have reached the same operation.
void wait_for_block();
void wait_for_warp(Operation operation);

// Suspends the thread until `*count`, which other blocks change, is at least `expected`.
void wait_for_count(const int32_t* count, int32_t expected);

// Publishes `size` bytes to the other lanes, waits for them, and returns all lanes' bytes, `kSlotSize` apart. They stay
// valid until the lane's next but one exchange.
inline constexpr int kSlotSize = 64;
const unsigned char* exchange(Operation operation, const void* bytes, size_t size);

// The block's array with that name and line; the first thread to ask creates it.
SharedMemory& shared_memory(const char* name, int line, size_t element_size, int64_t size);

// The array with that name and offset in the block's dynamic shared memory.
SharedMemory& dynamic_shared_memory(const char* name, int64_t offset, size_t element_size, int64_t size);

}  // namespace itm_fast::shim
