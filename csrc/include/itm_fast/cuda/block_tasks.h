// Numbered tasks for the blocks of a grid. A block that has finished one takes the next, because tasks differ in size.
#pragma once

#include "itm_fast/cuda/machine.h"

namespace itm_fast::cuda {

// Hands out tasks of several kinds, to all blocks in the same order of kinds. `taken` counts the tasks that blocks have
// taken; `restart` sets it to zero. A barrier of the grid is before each restart and after it, and there is one object
// per restart.
class BlockTasks {
 public:
  ITM_FAST_DEVICE static void restart(int32_t* taken) {
    if (block_index() == 0 && thread_index() == 0) *taken = 0;
  }

  ITM_FAST_DEVICE explicit BlockTasks(int32_t* taken) : taken_(taken) { take(); }

  // Calls body(number) for numbers below `count`.
  template <typename Body>
  ITM_FAST_DEVICE void share(int64_t count, const Body& body) {
    for (; next_ < first_ + count; take()) body(next_ - first_);
    first_ += count;
  }

 private:
  ITM_FAST_DEVICE void take() {
    ITM_FAST_SHARED(int32_t, next, 1);
    if (thread_index() == 0) next[0] = atomic_add(taken_, 1);
    barrier();
    next_ = next[0];
    barrier();  // All have read it.
  }

  int32_t* taken_;
  int64_t next_ = 0, first_ = 0;  // the task at hand, and the first one of its kind
};

}  // namespace itm_fast::cuda
