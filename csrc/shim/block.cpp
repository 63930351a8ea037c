// Fibers jump to each other's stacks, which the fortified longjmp refuses.
#undef _FORTIFY_SOURCE

#include "shim/block.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "shim/shared_memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace itm_fast::shim {
namespace {

constexpr int64_t kDynamicUnit = 2;  // the smallest element of an array in dynamic shared memory
constexpr size_t kStackSize = size_t{256} << 10;

// A suspended stack. The first switch to a fiber needs a context. Later ones are jumps, which unlike contexts make no
// system call for the signal mask; AddressSanitizer knows only contexts.
struct Place {
  ucontext_t context;
#if !defined(__SANITIZE_ADDRESS__)
  jmp_buf registers;
  bool entered = false;
#endif

  void switch_to(Place& other) {
#if defined(__SANITIZE_ADDRESS__)
    swapcontext(&context, &other.context);
#else
    entered = true;
    if (_setjmp(registers) != 0) return;
    if (other.entered) _longjmp(other.registers, 1);
    setcontext(&other.context);
#endif
  }
};

struct Fiber {
  Thread thread;
  Place place;
  unsigned char* stack;
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is suspended
  Operation waits_for = Operation::none;
  const int32_t* count = nullptr;  // suspended until *count is at least `expected`
  int32_t expected = 0;
  bool done = false;
};

struct Warp {
  int arrived = 0;  // threads that wait for the operation
  Operation waits_for = Operation::none;
  unsigned char slots[2][kWarpSize][kSlotSize];
};

class Block;
Block* running = nullptr;

// Keep the stacks for the next block. Pages that were never touched take no memory.
unsigned char* stack(int index) {
  static std::vector<unsigned char*> stacks;
  while (static_cast<int>(stacks.size()) <= index) {
    void* memory = mmap(nullptr, kStackSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stacks.push_back(static_cast<unsigned char*>(memory));
  }
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(stacks[index], kStackSize);  // A fiber that did not finish left its frames.
#endif
  return stacks[index];
}

class Block {
 public:
  // `place` is the block's index among the blocks that run together.
  Block(int64_t index, int64_t n_blocks, int place, int n_threads, uint64_t seed, const std::function<void()>& body,
        int64_t dynamic_bytes)
      : index(index),
        n_blocks(n_blocks),
        n_threads(n_threads),
        body_(body),
        random_(seed),
        fibers_(n_threads),
        warps_(n_threads / 32),
        dynamic_("dynamic shared memory", 0, kDynamicUnit, dynamic_bytes / kDynamicUnit) {
    for (int i = 0; i < n_threads; ++i) {
      Fiber& fiber = fibers_[i];
      fiber.thread.index = i;
      fiber.stack = stack(place * n_threads + i);
      prepare(fiber);
      ready_.push_back(&fiber);
    }
  }

  // Runs one thread until it waits; returns whether a thread could run.
  bool step() {
    for (size_t i = 0; i < resting_.size();) {
      if (*resting_[i]->count < resting_[i]->expected) {
        ++i;
        continue;
      }
      ready_.push_back(resting_[i]);
      resting_.erase(resting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!problem.empty() || ready_.empty()) return false;
    running = this;
    const size_t chosen = random_() % ready_.size();
    current_ = ready_[chosen];
    ready_[chosen] = ready_.back();
    ready_.pop_back();
    enter(*current_);
    running = nullptr;
    return true;
  }

  // Reports the waiting threads when no thread of any block can continue.
  void report_waiting() {
    const auto waiting = std::find_if(fibers_.begin(), fibers_.end(), [](const Fiber& fiber) { return !fiber.done; });
    if (waiting == fibers_.end() || !problem.empty()) return;
    const bool of_grid = std::any_of(fibers_.begin(), fibers_.end(), [](const Fiber& fiber) { return fiber.count; });
    problem = "block " + std::to_string(index) + ", thread " + std::to_string(waiting->thread.index) + ": waits for " +
              (of_grid ? "a barrier of the grid that other blocks" : name(waiting->waits_for) + " that other threads") +
              " never come to";
  }

  void rest(const int32_t* count, int32_t expected) {
    Fiber& fiber = *current_;
    fiber.count = count;
    fiber.expected = expected;
    resting_.push_back(&fiber);
    leave(fiber, false);
    fiber.count = nullptr;
  }

  Fiber& current() { return *current_; }

  void wait(Operation operation) {
    Fiber& fiber = *current_;
    Warp& warp = warps_[fiber.thread.index / kWarpSize];
    if (warp.arrived > 0 && warp.waits_for != operation) {
      const int other = first_waiting(fiber.thread.index / kWarpSize * kWarpSize);
      fail("waits for " + name(operation) + " while thread " + std::to_string(other) + " of its warp waits for " +
           name(warp.waits_for));
    }
    fiber.waits_for = warp.waits_for = operation;
    ++warp.arrived;
    const bool of_block = operation == Operation::barrier;
    if (of_block ? ++arrived_ == n_threads : warp.arrived == kWarpSize) {
      const int first = of_block ? 0 : fiber.thread.index / kWarpSize;
      const int last = of_block ? static_cast<int>(warps_.size()) : first + 1;
      for (int i = first; i < last; ++i) release(i);
      if (of_block) arrived_ = 0;
      ready_.push_back(&fiber);
    }
    leave(fiber, false);
  }

  const unsigned char* exchange(Operation operation, const void* bytes, size_t size) {
    const Thread& thread = current_->thread;
    Warp& warp = warps_[thread.index / kWarpSize];
    // A lane that is ahead writes to the other half; it cannot be two exchanges ahead.
    auto& slots = warp.slots[current_->thread.warp_operations++ % 2];
    std::memcpy(slots[thread.index % kWarpSize], bytes, size);
    wait(operation);
    return slots[0];
  }

  SharedMemory& shared_memory(const char* name, int line, size_t element_size, int64_t size) {
    for (const auto& array : arrays_) {
      if (array->is(name, line)) return *array;
    }
    arrays_.push_back(std::make_unique<SharedMemory>(name, line, element_size, size));
    return *arrays_.back();
  }

  SharedMemory& dynamic_shared_memory(const char* name, int64_t offset, size_t element_size, int64_t size) {
    for (const auto& array : arrays_) {
      if (array->is(name, offset, element_size, size)) return *array;
    }
    const int id = static_cast<int>(arrays_.size()) + 1;
    arrays_.push_back(std::make_unique<SharedMemory>(name, dynamic_, offset, element_size, size, id));
    return *arrays_.back();
  }

  [[noreturn]] void stop(const std::string& message) {
    problem = "block " + std::to_string(index) + ", thread " + std::to_string(current_->thread.index) + ": " + message;
    leave(*current_, false);
    __builtin_unreachable();  // run() enters no fiber after an error.
  }

  const int64_t index, n_blocks;
  const int n_threads;
  std::string problem;

 private:
  // All threads of a warp can continue, except the current one.
  void release(int warp) {
    warps_[warp].arrived = 0;
    for (int i = warp * kWarpSize; i < (warp + 1) * kWarpSize; ++i) {
      fibers_[i].waits_for = Operation::none;
      if (&fibers_[i] != current_) ready_.push_back(&fibers_[i]);
    }
  }

  int first_waiting(int thread) const {
    while (fibers_[thread].waits_for == Operation::none) ++thread;
    return thread;
  }

  static std::string name(Operation operation) {
    static const char* const names[] = {"nothing", "a barrier",   "warp_sync", "a shuffle",
                                        "a vote",  "load_matrix", "mma"};
    return names[static_cast<int>(operation)];
  }

  static void prepare(Fiber& fiber) {
    ucontext_t& context = fiber.place.context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackSize;
    context.uc_link = nullptr;
    makecontext(&context, [] { running->run_body(); }, 0);
  }

  void run_body() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &main_stack_, &main_stack_size_);
#endif
    body_();
    Fiber& fiber = *current_;
    if (!fiber.thread.open_copies.empty() || !fiber.thread.groups.empty()) {
      fail("the kernel ends with asynchronous copies that nothing waited for");
    }
    for (const auto& array : arrays_) array->check_red_zones();
    fiber.done = true;
    leave(fiber, true);
  }

  void enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&main_fake_stack_, fiber.stack, kStackSize);
#endif
    main_.switch_to(fiber.place);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(main_fake_stack_, nullptr, nullptr);
#endif
  }

  void leave(Fiber& fiber, [[maybe_unused]] bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, main_stack_, main_stack_size_);
#endif
    fiber.place.switch_to(main_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &main_stack_, &main_stack_size_);
#endif
  }

  const std::function<void()>& body_;
  std::mt19937_64 random_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Fiber*> ready_, resting_;
  std::vector<std::unique_ptr<SharedMemory>> arrays_;
  const SharedMemory dynamic_;
  Fiber* current_ = nullptr;
  int arrived_ = 0;
  Place main_;
  void* main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  size_t main_stack_size_ = 0;
};

}  // namespace

namespace {

std::string check_threads(int n_threads) {
  if (n_threads > 0 && n_threads <= 1024 && n_threads % kWarpSize == 0) return "";
  return "expected whole warps and at most 1024 threads a block, got " + std::to_string(n_threads);
}

}  // namespace

std::string launch(int64_t n_blocks, int n_threads, uint64_t seed, const std::function<void()>& body,
                   int64_t dynamic_bytes) {
  if (const std::string problem = check_threads(n_threads); !problem.empty()) return problem;
  std::mt19937_64 random(seed);
  std::vector<int64_t> order(n_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int64_t index : order) {
    Block block(index, n_blocks, 0, n_threads, random(), body, dynamic_bytes);
    while (block.step()) {
    }
    block.report_waiting();
    if (!block.problem.empty()) return block.problem;
  }
  return "";
}

std::string launch_together(int64_t n_blocks, int n_threads, uint64_t seed, const std::function<void()>& body,
                            int64_t dynamic_bytes) {
  if (const std::string problem = check_threads(n_threads); !problem.empty()) return problem;
  std::mt19937_64 random(seed);
  std::vector<std::unique_ptr<Block>> blocks;
  for (int64_t i = 0; i < n_blocks; ++i) {
    const int place = static_cast<int>(i);
    blocks.push_back(std::make_unique<Block>(i, n_blocks, place, n_threads, random(), body, dynamic_bytes));
  }
  const bool in_order = seed >= kInOrder;
  if (in_order) std::shuffle(blocks.begin(), blocks.end(), random);
  while (true) {
    // Start at a random place, or at the first one, and take the first block that can continue.
    const size_t first = n_blocks > 0 && !in_order ? random() % blocks.size() : 0;
    Block* stepped = nullptr;
    for (size_t i = 0; i < blocks.size() && stepped == nullptr; ++i) {
      Block& block = *blocks[(first + i) % blocks.size()];
      if (block.step()) stepped = &block;
    }
    if (stepped == nullptr) break;
    if (!stepped->problem.empty()) return stepped->problem;
  }
  for (const auto& block : blocks) {
    block->report_waiting();
    if (!block->problem.empty()) return block->problem;
  }
  return "";
}

Thread& thread() { return running->current().thread; }
int64_t block() { return running->index; }
int64_t grid_size() { return running->n_blocks; }
int block_size() { return running->n_threads; }
void fail(const std::string& message) { running->stop(message); }

void wait_for_block() {
  running->wait(Operation::barrier);
  ++thread().barriers;
}

void wait_for_warp(Operation operation) { running->wait(operation); }

void wait_for_count(const int32_t* count, int32_t expected) { running->rest(count, expected); }

const unsigned char* exchange(Operation operation, const void* bytes, size_t size) {
  return running->exchange(operation, bytes, size);
}

SharedMemory& shared_memory(const char* name, int line, size_t element_size, int64_t size) {
  return running->shared_memory(name, line, element_size, size);
}

SharedMemory& dynamic_shared_memory(const char* name, int64_t offset, size_t element_size, int64_t size) {
  return running->dynamic_shared_memory(name, offset, element_size, size);
}

}  // namespace itm_fast::shim
