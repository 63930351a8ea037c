// retrieval_ranks on a GPU by counting: two launches over integers, no sort.
//
// best_own_scores finds the best score among every image's own captions. count_ranks then counts, in one pass over the
// scores, the higher scores in the image's row, and those above each caption's own score in its column. Maxima of
// integers and sums of counts do not depend on the order of the blocks.
#pragma once

#include "itm_fast/cuda/machine.h"
#include "itm_fast/cuda/score_tile.h"

namespace itm_fast::cuda {

// Scores as integers in the same order: 0 means no score, 1 means NaN, which is below every number.
inline constexpr uint64_t kNoScore = 0, kNanScore = 1;

template <typename T>
struct Ranks {
  const T* scores;               // (n_images, n_captions), dense
  const int64_t* caption_image;  // an index out of range belongs to no image
  int64_t n_images, n_captions;
  bool pessimistic;
  uint64_t* best_own;      // kNoScore, one per image
  int64_t* image_ranks;    // zero
  int64_t* caption_ranks;  // zero

  ITM_FAST_DEVICE bool has_image(int64_t caption) const {
    return caption_image[caption] >= 0 && caption_image[caption] < n_images;
  }
};

// The bits of a float64, with negative numbers inverted and positive ones moved above them. The values 0 and 1 remain
// free: they would be the bits of NaNs.
ITM_FAST_DEVICE uint64_t ordered_score(double score) {
  if (score != score) return kNanScore;
  uint64_t bits;
  __builtin_memcpy(&bits, &score, sizeof(bits));
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

ITM_FAST_DEVICE double score_of_order(uint64_t order) {
  uint64_t bits = order >> 63 != 0 ? order & ~(uint64_t{1} << 63) : ~order;
  if (order <= kNanScore) bits = uint64_t{0x7ff8} << 48;
  double score;
  __builtin_memcpy(&score, &bits, sizeof(score));
  return score;
}

// Whether a score of another image counts as higher than the own one. NaN is the lowest value and equal to NaN.
template <typename T>
ITM_FAST_DEVICE bool is_above(T score, T own, bool pessimistic) {
  const bool score_is_nan = score != score, own_is_nan = own != own;
  if (score_is_nan || own_is_nan) return own_is_nan && (!score_is_nan || pessimistic);
  return score > own || (pessimistic && score == own);
}

// Grid: one thread per caption.
template <typename T>
ITM_FAST_DEVICE void best_own_scores(const Ranks<T>& p) {
  const int64_t caption = block_index() * block_threads() + thread_index();
  if (caption >= p.n_captions || !p.has_image(caption)) return;
  const int64_t image = p.caption_image[caption];
  atomic_max(p.best_own + image, ordered_score(static_cast<double>(p.scores[image * p.n_captions + caption])));
}

// Grid: one block per tile; tiles of a strip of rows are adjacent.
template <typename T, typename Tile>
ITM_FAST_DEVICE void count_ranks(const Ranks<T>& p) {
  ITM_FAST_SHARED(int32_t, counts, Tile::kColumns);
  const int64_t column_tiles = tiles_of(p.n_captions, Tile::kColumns);
  const int64_t first_image = block_index() / column_tiles * Tile::kRows;
  const int64_t first_caption = block_index() % column_tiles * Tile::kColumns;
  for (int c = thread_index(); c < Tile::kColumns; c += Tile::kThreads) counts[c] = 0;
  barrier();

  T own[Tile::kColumnsPerLane];
  int64_t image_of[Tile::kColumnsPerLane];
  int32_t caption_count[Tile::kColumnsPerLane] = {};
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
    const int64_t caption = first_caption + k * 32 + lane();
    image_of[k] = caption < p.n_captions && p.has_image(caption) ? p.caption_image[caption] : -1;
    own[k] = image_of[k] >= 0 ? p.scores[image_of[k] * p.n_captions + caption] : -infinity<T>();
  }
  for (int r = 0; r < Tile::kRowsPerWarp; ++r) {
    const int64_t image = first_image + warp() * Tile::kRowsPerWarp + r;
    if (image >= p.n_images) break;  // The whole warp leaves the loop.
    const uint64_t order = p.best_own[image];
    const T best = static_cast<T>(score_of_order(order));
    int32_t image_count = 0;
    for (int k = 0; k < Tile::kColumnsPerLane; ++k) {
      const int64_t caption = first_caption + k * 32 + lane();
      bool above_best = false;
      if (caption < p.n_captions && image_of[k] != image) {
        const T score = p.scores[image * p.n_captions + caption];
        above_best = is_above(score, best, p.pessimistic);
        caption_count[k] += is_above(score, own[k], p.pessimistic);
      }
      image_count += count_bits(ballot(above_best));
    }
    if (lane() == 0 && order != kNoScore) atomic_add(p.image_ranks + image, static_cast<int64_t>(image_count));
    // An image without captions has the rank -1, which the first tile of its strip writes.
    if (lane() == 0 && order == kNoScore && first_caption == 0) p.image_ranks[image] = -1;
  }
  for (int k = 0; k < Tile::kColumnsPerLane; ++k) atomic_add(counts, k * 32 + lane(), caption_count[k]);
  barrier();
  for (int c = thread_index(); c < Tile::kColumns && first_caption + c < p.n_captions; c += Tile::kThreads) {
    const int32_t count = counts[c];
    atomic_add(p.caption_ranks + first_caption + c, static_cast<int64_t>(count));
  }
}

}  // namespace itm_fast::cuda
