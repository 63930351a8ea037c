// Launch of the backward of cross_attention_scores: grids and workspaces. Host code, shared by the launcher and the
// tests.
#pragma once

#include <algorithm>
#include <type_traits>

#include "itm_fast/cuda/cross_attention_backward.h"
#include "itm_fast/cuda/longest_sets.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// Numbers kept at a time, 4 bytes each: those of three pairs for each of 1,024 images of 36 regions with captions of 13
// words take two times 28 MB.
inline constexpr int64_t kRoomForNumbers = 7'000'000;
// Context sets have a Gram matrix up to the length of the longest one; if that is unknown, up to a quarter longer than
// the average. In each case those up to the first number have one. Longer ones, up to the second number, have one if
// there is room: for one of them, and for more in a batch of short sets.
inline constexpr int64_t kLeastGram = 112, kMostGram = 640;
// Blocks of backpropagate_pairs, each with kAttendedQueries float32 vectors: two per multiprocessor on every GPU so
// far.
inline constexpr int64_t kPropagatingBlocks = 288;

// Gradients of more than this share of all pairs take blocks of scores, whose work is that of all pairs.
inline constexpr float kDenseShare = 0.65f;

// The sizes of a call, known on the host.
struct BackwardSizes {
  int64_t query_sets, query_rows, context_sets, context_rows, dim;
  bool for_queries, for_contexts;
  LongestSets longest;
  int64_t room = kRoomForNumbers;
  float dense_share = kDenseShare;

  int64_t pairs() const { return query_sets * context_sets; }
  bool needs_gradients() const { return for_queries || for_contexts; }
  // At least the numbers of all pairs, for a gradient without zeros.
  int64_t numbers() const {
    return (query_rows + 7 * query_sets) * (13 * (context_rows + 7 * context_sets) + 10 * context_sets) / 2 +
           4 * pairs();
  }
  int64_t gram_contexts() const {
    const int64_t by_average = std::clamp(longest_by_average(context_sets, context_rows), kLeastGram, kMostGram);
    const int64_t most = longest_with_gram(longest.contexts, context_rows, by_average);
    return padded_parts(std::clamp(most, kLeastGram, kMostGram));
  }
  int64_t gram_room() const {
    const bool all_have_one = longest.contexts > 0 && longest.contexts <= gram_contexts();
    const int64_t long_one = all_have_one ? 0 : std::min(context_rows, kMostGram);
    return context_rows * gram_contexts() + long_one * padded_parts(long_one);
  }
  // Whether there may be several chunks, or a pair that takes more than half of the room. Gradients then need float32
  // sums.
  bool may_need_chunks() const { return 2 * numbers() > room; }

  // Whether sets are short enough for the tiles of blocks.
  bool may_take_blocks() const {
    return fit_tile(longest.contexts, context_sets, context_rows, BlockTile::kRows) &&
           fit_tile(longest.queries, query_sets, query_rows, BlockTile::kColumns);
  }

  int64_t list_blocks() const {
    return list_blocks_of_contexts(context_sets) + (for_queries ? tiles_of(query_sets, kListWarps) : 0);
  }
  int64_t propagating_blocks() const {
    if (!needs_gradients()) return 0;
    const int64_t sets = (for_contexts ? context_sets : 0) + (for_queries ? query_sets : 0);
    // One at least clears the gradients of rows that belong to no set.
    return std::clamp(std::max(pairs(), sets * slices_of(dim)), int64_t{1}, kPropagatingBlocks);
  }
};

// The float32 sums of a gradient: the gradient itself if it is float32.
inline float* place_sums(float* gradients, int64_t, Workspace&) { return gradients; }
template <typename S>
float* place_sums(S*, int64_t size, Workspace& workspace) {
  return workspace.take<float>(size);
}

// Dynamic shared memory of a block of backpropagate_pairs. The same for rows of every type.
inline constexpr int64_t kBackwardBytes =
    std::max<int64_t>({PartTile<float>::kBytes, PartTile<Half>::kBytes, PartTile<SplitElement<3>>::kBytes,
                       SetTile::kBytes, BlockSums<float>::kBytes, BlockSums<Half>::kBytes, BlockMemory::kBytes});

// Lays out p's workspace, apart from operands, options and results; returns the leading bytes that must be zero.
template <typename S>
int64_t place_backward(CrossAttentionBackward<S>& p, const BackwardSizes& sizes, Workspace& workspace) {
  PairLists<S>& lists = p.lists;
  lists.largest = workspace.take<uint64_t>(1);
  lists.finished = workspace.take<int32_t>(1);
  p.arrived = workspace.take<int32_t>(1);
  p.unsuitable = workspace.take<int32_t>(1);
  lists.longest = workspace.take<uint64_t>(1);
  const int64_t zeros = workspace.bytes();
  p.taken = workspace.take<int32_t>(1);
  lists.context_lists = workspace.take<int32_t>(sizes.pairs());
  lists.query_starts = workspace.take<int64_t>(sizes.pairs());
  lists.context_counts = workspace.take<int32_t>(sizes.context_sets);
  lists.context_numbers = workspace.take<int64_t>(sizes.context_sets);
  lists.first_pair = workspace.take<int64_t>(sizes.context_sets);
  lists.first_number = workspace.take<int64_t>(sizes.context_sets);
  lists.total_numbers = workspace.take<int64_t>(1);
  lists.gram_starts = workspace.take<int64_t>(sizes.context_sets);
  lists.sure_gram = sizes.gram_contexts();
  lists.most_gram = kMostGram;
  lists.gram_room = sizes.gram_room();
  lists.query_lists = sizes.for_queries ? workspace.take<int32_t>(sizes.pairs()) : nullptr;
  lists.query_counts = sizes.for_queries ? workspace.take<int32_t>(sizes.query_sets) : nullptr;
  p.room = std::min(2 * sizes.numbers(), sizes.room);
  lists.most_numbers = p.room / 2;  // so that chunks do not become small
  if (!sizes.needs_gradients()) return zeros;

  p.numbers = workspace.take<float>(p.room);
  p.grams = workspace.take<uint16_t>(kMatrixParts * lists.gram_room);
  p.query_factors = workspace.take<float>(sizes.query_rows);
  p.attended = workspace.take<float>(sizes.propagating_blocks() * kAttendedQueries * sizes.dim);
  p.may_need_chunks = std::is_same_v<S, float> || sizes.may_need_chunks();
  p.dense_share = p.may_need_chunks && sizes.may_take_blocks() ? sizes.dense_share : 1.0f;
  if (!p.may_need_chunks) return zeros;
  if (p.dense_share < 1.0f) {
    p.query_norms = workspace.take<float>(sizes.query_rows);
    place_plan(p.context_tiles, most_tiles(sizes.context_sets, sizes.context_rows, BlockTile::kRows), workspace);
    place_plan(p.query_tiles, most_tiles(sizes.query_sets, sizes.query_rows, BlockTile::kColumns), workspace);
  }
  if (sizes.for_queries) p.query_sums = place_sums(p.query_gradients, sizes.query_rows * sizes.dim, workspace);
  if (sizes.for_contexts) p.context_sums = place_sums(p.context_gradients, sizes.context_rows * sizes.dim, workspace);
  return zeros;
}

}  // namespace itm_fast::cuda
