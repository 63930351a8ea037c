// retrieval_ranks on the CPU: reads every own score, shares the rows among threads, and removes an image's own captions
// from the counts. Counts are whole numbers, so they do not depend on the number of threads.
#include "ops/retrieval.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpu/kernels/retrieval.h"
#include "cpu/kernels/select.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// With fewer scores than this, a second thread is not worth its cost.
constexpr int64_t kElementsPerThread = int64_t{1} << 16;

const RetrievalKernels<float>& kernels(float) { ITM_FAST_RETURN_SELECTED(kRetrievalFloat32) }
const RetrievalKernels<double>& kernels(double) { ITM_FAST_RETURN_SELECTED(kRetrievalFloat64) }

// The captions of every image: image i has captions[first[i]] up to captions[first[i + 1]].
struct CaptionsByImage {
  CaptionsByImage(const int64_t* caption_image, int64_t n_captions, int64_t n_images)
      : first(n_images + 1), captions(n_captions) {
    for (int64_t c = 0; c < n_captions; ++c) {
      STD_TORCH_CHECK(caption_image[c] >= 0 && caption_image[c] < n_images, "caption_image: expected images from 0 to ",
                      n_images - 1, ", got ", caption_image[c], " for caption ", c);
      ++first[caption_image[c] + 1];
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t c = 0; c < n_captions; ++c) captions[next[caption_image[c]]++] = c;
  }

  std::vector<int64_t> first, captions;
};

template <typename T>
std::tuple<Tensor, Tensor> ranks(const Tensor& scores, const Tensor& caption_image, bool pessimistic) {
  const int64_t n_images = scores.size(0), n_captions = scores.size(1);
  const bool rows_are_dense = n_captions <= 1 || scores.stride(1) == 1;
  const Tensor rows = rows_are_dense ? scores : torch::stable::contiguous(scores);
  const Tensor images = torch::stable::contiguous(caption_image);
  const T* score = static_cast<const T*>(rows.const_data_ptr());
  const int64_t* image_of = static_cast<const int64_t*>(images.const_data_ptr());
  const int64_t stride = rows.stride(0);
  const CaptionsByImage own(image_of, n_captions, n_images);

  std::vector<T> column_own(padded_to_lanes(n_captions), T(0));
  std::vector<T> row_own(n_images, std::numeric_limits<T>::quiet_NaN());
  for (int64_t c = 0; c < n_captions; ++c) {
    column_own[c] = score[image_of[c] * stride + c];
    T& best = row_own[image_of[c]];
    if (!(column_own[c] <= best) && column_own[c] == column_own[c]) best = column_own[c];
  }

  Tensor image_ranks = torch::stable::new_empty(scores, {n_images}, ScalarType::Long);
  Tensor caption_ranks = torch::stable::new_empty(scores, {n_captions}, ScalarType::Long);
  int64_t* image_out = static_cast<int64_t*>(image_ranks.mutable_data_ptr());
  int64_t* caption_out = static_cast<int64_t*>(caption_ranks.mutable_data_ptr());
  std::fill_n(caption_out, n_captions, 0);
  std::mutex merging;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, n_captions));
  torch::stable::parallel_for(0, n_images, grain, [&](int64_t first, int64_t last) {
    std::vector<LaneInteger<T>> column_count(column_own.size(), 0);
    kernels(T()).count({score, stride, n_captions, first, last, pessimistic, row_own.data(), column_own.data(),
                        image_out, column_count.data()});
    const std::lock_guard<std::mutex> lock(merging);
    for (int64_t c = 0; c < n_captions; ++c) caption_out[c] += column_count[c];
  });

  for (int64_t i = 0; i < n_images; ++i) {
    const int64_t n_own = own.first[i + 1] - own.first[i];
    if (n_own == 0) {
      image_out[i] = -1;
    } else if (pessimistic && row_own[i] != row_own[i]) {
      image_out[i] = n_captions - n_own;  // everything is at least as high as NaN
    } else if (pessimistic) {
      // Exactly the own captions that share the best score were counted.
      for (int64_t k = own.first[i]; k < own.first[i + 1]; ++k)
        image_out[i] -= column_own[own.captions[k]] == row_own[i];
    }
  }
  if (pessimistic) {
    for (int64_t c = 0; c < n_captions; ++c) {
      caption_out[c] = column_own[c] == column_own[c] ? caption_out[c] - 1 : n_images - 1;
    }
  }
  return {image_ranks, caption_ranks};
}

std::tuple<Tensor, Tensor> retrieval_ranks(const Tensor& scores, const Tensor& caption_image, bool pessimistic) {
  check_retrieval(scores, caption_image);
  const auto run = scores.scalar_type() == ScalarType::Double ? ranks<double> : ranks<float>;
  return run(scores, caption_image, pessimistic);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) { m.impl("retrieval_ranks", TORCH_BOX(&itm_fast::retrieval_ranks)); }
