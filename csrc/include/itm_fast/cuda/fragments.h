// The lane and the register that hold each element: one table for the shim's tensor cores and for kernels that read or
// write fragments. From the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" (16-bit operands,
// float32 sums) and "Warp-level matrix load instruction: ldmatrix".
//
// A register of 16-bit elements holds two of them, the first in its lower half; element 2r + h is half h of register r.
#pragma once

#include <cstdint>

namespace itm_fast::cuda {

struct Place {
  int row, column;
};

// A of the product, 16 x 16: elements 0 to 7 of a lane.
constexpr Place mma_a_place(int lane, int element) {
  return {lane / 4 + (element / 2 % 2) * 8, lane % 4 * 2 + element % 2 + (element / 4) * 8};
}

// B of the product, 16 x 8: elements 0 to 3 of a lane.
constexpr Place mma_b_place(int lane, int element) {
  return {lane % 4 * 2 + element % 2 + (element / 2) * 8, lane / 4};
}

// The sums, 16 x 8: float32 registers 0 to 3 of a lane.
constexpr Place mma_sum_place(int lane, int element) {
  return {lane / 4 + (element / 2) * 8, lane % 4 * 2 + element % 2};
}

// Half h of a register that load_matrix fills, in the 8 x 8 matrix of that register.
constexpr Place load_matrix_place(int lane, int half) { return {lane / 4, lane % 4 * 2 + half}; }

// The same for load_matrix_transposed: the position in the matrix in memory.
constexpr Place load_matrix_transposed_place(int lane, int half) { return {lane % 4 * 2 + half, lane / 4}; }

// The lane with the address of a row of matrix 0 to 3, for both.
constexpr int load_matrix_address_lane(int matrix, int row) { return matrix * 8 + row; }

}  // namespace itm_fast::cuda
