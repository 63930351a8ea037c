// The kernels that triplet_loss and boosting_loss share on CUDA, and their launches.
#pragma once

#include "cuda/triplet_problem.h"
#include "ops/loss_results.h"

namespace itm_fast::cuda {
namespace {

// Blocks of the forward per multiprocessor: as many as fit without register spills.
template <typename Problem>
constexpr int kResidentBlocks = Problem::kMaxParts == 1 && sizeof(typename Problem::T) == 4 ? 4 : 2;

// See triplet_forward for the grid, for which block writes what, and for the tie rule.
template <typename Problem, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, kResidentBlocks<Problem>)
    triplet_forward_kernel(const TripletForward<Problem> parameters) {
  triplet_forward<Problem, Tile>(parameters);
}

// See triplet_backward for the grid and for which block writes what.
template <typename Problem, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) triplet_backward_kernel(const TripletBackward<Problem> parameters) {
  triplet_backward<Problem, Tile>(parameters);
}

// See triplet_with_gradient for the grid and for what the blocks share. The launch bound asks for one block per
// multiprocessor; without it, the compiler spills registers.
template <typename Problem, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    triplet_with_gradient_kernel(const TripletWithGradient<Problem> parameters) {
  triplet_with_gradient<Problem, Tile>(parameters);
}

// `loss` and `negatives` as in place_forward.
template <typename Problem, typename T = typename Problem::T>
void run_forward(TripletForward<Problem> p, T* loss, int64_t* negatives, const torch::stable::Tensor& scores) {
  const DeviceStream device(scores);
  with_tile(p.problem.rows, p.problem.columns, [&]<typename Tile>(Tile) {
    Workspace measured;
    const int64_t zeros = place_forward<Tile>(p, loss, negatives, measured);
    const torch::stable::Tensor memory = scratch(scores, measured.bytes());
    Workspace workspace(memory.mutable_data_ptr());
    place_forward<Tile>(p, loss, negatives, workspace);
    device.set_zero(memory.mutable_data_ptr(), zeros);
    device.launch(triplet_forward_kernel<Problem, Tile>, blocks_of<Tile>(p.problem.rows, p.problem.columns),
                  Tile::kThreads, p);
  });
}

template <typename Problem>
void run_backward(TripletBackward<Problem> p, const torch::stable::Tensor& scores) {
  const DeviceStream device(scores);
  Workspace measured;
  place_backward(p, measured);
  const torch::stable::Tensor memory = scratch(scores, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  place_backward(p, workspace);
  device.set_zero(memory.mutable_data_ptr(), workspace.bytes());
  with_tile(p.problem.rows, p.problem.columns, [&]<typename Tile>(Tile) {
    device.launch(triplet_backward_kernel<Problem, Tile>, blocks_of<Tile>(p.problem.rows, p.problem.columns),
                  Tile::kThreads, p);
  });
}

// p.forward has its problem and options, p.backward the results; `loss` and `negatives` as in place_forward.
template <typename Problem, typename T = typename Problem::T>
void run_with_gradient(TripletWithGradient<Problem> p, T* loss, int64_t* negatives,
                       const torch::stable::Tensor& scores) {
  const int64_t rows = p.forward.problem.rows, columns = p.forward.problem.columns;
  check_one_launch(rows, columns);
  p.backward.problem = p.forward.problem;
  p.backward.options = p.forward.options;
  const DeviceStream device(scores);
  with_tile(rows, columns, [&]<typename Tile>(Tile) {
    Workspace measured;
    const int64_t zeros = place_with_gradient<Tile>(p, loss, negatives, measured);
    const torch::stable::Tensor memory = scratch(scores, measured.bytes());
    Workspace workspace(memory.mutable_data_ptr());
    place_with_gradient<Tile>(p, loss, negatives, workspace);
    device.set_zero(memory.mutable_data_ptr(), zeros);
    device.launch_together(triplet_with_gradient_kernel<Problem, Tile>, blocks_of<Tile>(rows, columns), Tile::kThreads,
                           p);
  });
}

}  // namespace
}  // namespace itm_fast::cuda
