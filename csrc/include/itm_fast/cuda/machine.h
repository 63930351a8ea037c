// The machine as a kernel body sees it. Bodies use what this header declares and nothing else of CUDA, so that the same
// source is compiled by nvcc (PTX bodies, device_machine.h) and, for the tests, by a C++ compiler (csrc/shim).
//
// Inside, for both:
// - ITM_FAST_DEVICE before every function, or ITM_FAST_DEVICE_APART where its registers must stay out of its caller's;
//   ITM_FAST_SHARED(type, name, size) for an array of the block's shared memory.
// - ITM_FAST_UNROLLED before a loop with a constant number of rounds whose counter is an index of an array that is to
//   stay in registers.
// - ITM_FAST_DYNAMIC_SHARED(type, name, offset, size) for one in the memory that the launch asks for, `offset` bytes
//   into it. Arrays there may lie over each other; what was written through one is not for another to read.
// - thread_index, block_threads, block_index, grid_blocks, lane, warp: blocks and grids have one dimension.
// - barrier (whole block), warp_sync (whole warp): the only two that order accesses to shared memory.
// - grid_barrier(arrived, round): of all blocks of a launch whose blocks are resident together; `arrived` was zero
//   before the launch, and `round` counts the barriers from 1. It orders accesses to global memory, too.
// - shuffle, shuffle_xor, vote_any, vote_all, ballot: of whole warps, and no order between accesses to memory.
// - atomic_add, atomic_max: integers alone, for whose sums and maxima the order is of no consequence.
// - exponential: of float and double, logarithm_of_one_plus: of float, to the accuracy of the platform's library.
// - memory_fence, load_coherent: what other blocks of the same launch wrote.
// - copy_async, commit_copies, wait_copies: 16 bytes from global to shared memory, see below.
// - bf16_value, fp16_value, bf16_bits, fp16_bits: 16-bit numbers as float32 and back, to the nearest; bf16_pair: two.
// - load_matrix, load_matrix_transposed, mma_bf16, mma_fp16: tensor cores; fragments.h says which lane holds what.
//
// copy_async(target, index, source, count) copies `count` elements, the rest of the 16 bytes becomes zero. It has
// happened after wait_copies<n>() of the same thread, for all groups (closed by commit_copies) but the n latest, and is
// seen by other threads after a barrier that follows.
#pragma once

#if defined(__CUDACC__)
#include "itm_fast/cuda/device_machine.h"
#else
#include "shim/machine.h"
#endif
