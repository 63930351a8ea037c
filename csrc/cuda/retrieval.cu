// retrieval_ranks on CUDA: two launches.
#include "ops/retrieval.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "cuda/launch.h"
#include "itm_fast/cuda/retrieval.h"
#include "itm_fast/cuda/triplet_launch.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kOwnThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kOwnThreads) best_own_scores_kernel(const Ranks<T> parameters) {
  best_own_scores(parameters);
}

// See count_ranks for the grid and for which block writes what.
template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) count_ranks_kernel(const Ranks<T> parameters) {
  count_ranks<T, Tile>(parameters);
}

template <typename T>
std::tuple<Tensor, Tensor> ranks(const Tensor& scores, const Tensor& caption_image, bool pessimistic) {
  const int64_t n_images = scores.size(0), n_captions = scores.size(1);
  const Tensor dense = torch::stable::contiguous(scores), images = torch::stable::contiguous(caption_image);
  Tensor image_ranks = torch::stable::new_zeros(scores, {n_images}, ScalarType::Long);
  Tensor caption_ranks = torch::stable::new_zeros(scores, {n_captions}, ScalarType::Long);
  const Tensor best_own = torch::stable::new_zeros(scores, {n_images}, ScalarType::Long);
  const Ranks<T> p{data_of<T>(dense),
                   data_of<int64_t>(images),
                   n_images,
                   n_captions,
                   pessimistic,
                   mutable_data_of<uint64_t>(best_own),
                   mutable_data_of<int64_t>(image_ranks),
                   mutable_data_of<int64_t>(caption_ranks)};
  const DeviceStream device(scores);
  device.launch(best_own_scores_kernel<T>, tiles_of(n_captions, kOwnThreads), kOwnThreads, p);
  with_tile(n_images, n_captions, [&]<typename Tile>(Tile) {
    device.launch(count_ranks_kernel<T, Tile>, blocks_of<Tile>(n_images, n_captions), Tile::kThreads, p);
  });
  return {image_ranks, caption_ranks};
}

std::tuple<Tensor, Tensor> retrieval_ranks(const Tensor& scores, const Tensor& caption_image, bool pessimistic) {
  check_retrieval(scores, caption_image);
  const auto run = scores.scalar_type() == ScalarType::Double ? ranks<double> : ranks<float>;
  return run(scores, caption_image, pessimistic);
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) { m.impl("retrieval_ranks", TORCH_BOX(&itm_fast::cuda::retrieval_ranks)); }
