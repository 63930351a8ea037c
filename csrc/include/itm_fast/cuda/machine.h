// The GPU as seen by a kernel body. Bodies use only what this header declares and nothing else of CUDA. So the same
// source compiles with nvcc (PTX bodies, device_machine.h) and, for the tests, with a C++ compiler (csrc/shim).
//
// Both provide:
// - ITM_FAST_DEVICE before every function, or ITM_FAST_DEVICE_APART to keep its registers separate from its caller's;
//   ITM_FAST_SHARED(type, name, size) for an array in the block's shared memory.
// - ITM_FAST_UNROLLED before a loop with a constant number of iterations whose counter indexes an array that must stay
//   in registers; ITM_FAST_ROLLED before one that should stay a loop, because its body takes many registers.
// - opaque(value): the value itself, of whose origin the compiler knows nothing. It computes what depends on the value
//   here, and keeps no registers for it before.
// - ITM_FAST_DYNAMIC_SHARED(type, name, offset, size) for an array in the launch's dynamic shared memory, `offset`
//   bytes from its start. Such arrays may overlap; do not read through one what was written through another.
// - thread_index, block_threads, block_index, grid_blocks, lane, warp: blocks and grids have one dimension.
// - barrier (whole block), warp_sync (whole warp): the only two that order accesses to shared memory.
// - grid_barrier(arrived, round): for all blocks of a launch whose blocks are resident together. `arrived` is zero
//   before the launch, and `round` counts the barriers from 1. It also orders accesses to global memory.
// - shuffle, shuffle_xor, vote_any, vote_all, ballot: for whole warps; they do not order memory accesses.
// - atomic_add, atomic_max: only for integers, whose sums and maxima do not depend on the order.
// - exponential (float and double), logarithm_of_one_plus (float): with the accuracy of the platform's library.
// - memory_fence, load_coherent: to read what other blocks of the same launch wrote.
// - load_four: four floats at an address aligned to 16 bytes, in one load.
// - copy_async, commit_copies, wait_copies: copy 16 bytes from global to shared memory, see below.
// - bf16_value, fp16_value, bf16_bits, fp16_bits: 16-bit numbers to float32 and back, to nearest; bf16_pair: two.
// - load_matrix, load_matrix_transposed, mma_bf16, mma_fp16: tensor cores; fragments.h says which lane holds what.
//
// copy_async(target, index, source, count) copies `count` elements and fills the rest of the 16 bytes with zeros. The
// copy is complete after wait_copies<n>() of the same thread, for all groups (closed by commit_copies) except the n
// latest. Other threads see it after a barrier that follows.
#pragma once

#if defined(__CUDACC__)
#include "itm_fast/cuda/device_machine.h"
#else
#include "shim/machine.h"
#endif
