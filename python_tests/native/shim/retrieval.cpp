// The kernels of retrieval_ranks in the shim. Each function returns an error message or an empty string.
#include "itm_fast/cuda/retrieval.h"

#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/triplet_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

template <typename T>
const char* ranks(uint64_t seed, bool large, int64_t n_images, int64_t n_captions, const T* scores,
                  const int64_t* caption_image, bool pessimistic, int64_t* image_ranks, int64_t* caption_ranks) {
  const Exact<T> table(scores, n_images * n_captions);
  const Exact<int64_t> images(caption_image, n_captions);
  std::vector<uint64_t> best_own(n_images, 0);
  std::vector<int64_t> of_images(n_images, 0), of_captions(n_captions, 0);
  const Ranks<T> p{table.memory, images.memory,   n_images,         n_captions,
                   pessimistic,  best_own.data(), of_images.data(), of_captions.data()};
  constexpr int kThreads = 64;
  std::string problem = shim::launch(tiles_of(n_captions, kThreads), kThreads, seed, [&] { best_own_scores(p); });
  const auto count = [&]<typename Tile>(Tile) {
    problem =
        shim::launch(blocks_of<Tile>(n_images, n_captions), Tile::kThreads, seed, [&] { count_ranks<T, Tile>(p); });
  };
  if (problem.empty()) large ? count(LargeTile()) : count(SmallTile());
  std::copy(of_images.begin(), of_images.end(), image_ranks);
  std::copy(of_captions.begin(), of_captions.end(), caption_ranks);
  return report(problem);
}

}  // namespace

#define ITM_FAST_RETRIEVAL(T, suffix)                                                                                 \
  extern "C" const char* retrieval_ranks_##suffix(int64_t seed, int64_t large, int64_t n_images, int64_t n_captions,  \
                                                  const T* scores, const int64_t* caption_image, int64_t pessimistic, \
                                                  int64_t* image_ranks, int64_t* caption_ranks) {                     \
    return ranks<T>(seed, large != 0, n_images, n_captions, scores, caption_image, pessimistic != 0, image_ranks,     \
                    caption_ranks);                                                                                   \
  }
ITM_FAST_RETRIEVAL(float, float32)
ITM_FAST_RETRIEVAL(double, float64)

extern "C" double order_and_back(double score) { return score_of_order(ordered_score(score)); }
extern "C" int order_rises(double lower, double higher) { return ordered_score(lower) < ordered_score(higher); }
