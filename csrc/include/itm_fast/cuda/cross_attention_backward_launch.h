// Launch of the backward of cross_attention_scores: grids and workspaces. Host code, shared by the launcher and the
// tests.
#pragma once

#include <algorithm>

#include "itm_fast/cuda/cross_attention_backward.h"
#include "itm_fast/cuda/workspace.h"

namespace itm_fast::cuda {

// Maximum number of raw scores of kept pairs, 12 bytes each and up to 16 per query row: at most 900 MiB. A dense
// gradient of 128 images of 36 regions with 128 captions of 13 words takes 92 MB.
inline constexpr int64_t kRoomForScores = int64_t{1} << 25;
// Blocks that differentiate pairs, each with kAttendedQueries float32 vectors: at least two per multiprocessor on every
// GPU so far.
inline constexpr int64_t kDifferentiatingBlocks = 512, kFinishingBlocks = 256;

// The sizes of a call, known on the host.
struct BackwardSizes {
  int64_t query_sets, query_rows, context_sets, context_rows, dim;
  bool for_queries, for_contexts;
  int64_t room = kRoomForScores;  // for raw scores

  // The worst case of pairs, of their query rows and of their raw scores: a gradient without zeros.
  int64_t pairs() const { return query_sets * context_sets; }
  int64_t rows() const { return query_rows * context_sets; }
  int64_t scores() const { return query_rows * context_rows; }
  bool needs_gradients() const { return for_queries || for_contexts; }
  // Whether pairs may exceed the room. If so, the call needs one more launch and float32 sums of all gradients.
  bool needs_finish() const { return needs_gradients() && std::max(rows(), scores()) > room; }

  int64_t list_blocks() const {
    return list_blocks_of_contexts(context_sets) + (for_queries ? tiles_of(query_sets, kListWarps) : 0);
  }
  int64_t differentiating_blocks() const { return std::min(std::max<int64_t>(pairs(), 1), kDifferentiatingBlocks); }
  int64_t accumulating_blocks() const {
    return ((for_contexts ? context_sets : 0) + (for_queries ? query_sets : 0)) * slices_of(dim);
  }
  int64_t finishing_blocks() const { return std::min(differentiating_blocks(), kFinishingBlocks); }
};

// Lays out p's workspace, apart from operands, options and results; returns the leading bytes that must be zero.
template <typename S>
int64_t place_backward(CrossAttentionBackward<S>& p, const BackwardSizes& sizes, Workspace& workspace) {
  PairLists<S>& lists = p.lists;
  lists.most_scores = workspace.take<uint64_t>(1);
  lists.most_rows = workspace.take<uint64_t>(1);
  lists.finished = workspace.take<int32_t>(1);
  const int64_t zeros = workspace.bytes();
  lists.context_lists = workspace.take<int32_t>(sizes.pairs());
  lists.query_starts = workspace.take<int64_t>(sizes.pairs());
  lists.context_counts = workspace.take<int32_t>(sizes.context_sets);
  lists.context_rows = workspace.take<int64_t>(sizes.context_sets);
  lists.first_pair = workspace.take<int64_t>(sizes.context_sets);
  lists.first_row = workspace.take<int64_t>(sizes.context_sets);
  lists.first_score = workspace.take<int64_t>(sizes.context_sets);
  lists.query_lists = sizes.for_queries ? workspace.take<int32_t>(sizes.pairs()) : nullptr;
  lists.query_counts = sizes.for_queries ? workspace.take<int32_t>(sizes.query_sets) : nullptr;
  if (!sizes.needs_gradients()) return zeros;

  p.room_for_scores = std::min(sizes.scores(), sizes.room);
  p.room_for_rows = std::min(sizes.rows(), sizes.room);
  for (float** matrix : {&p.numbers.scores, &p.numbers.attention, &p.numbers.mixed}) {
    *matrix = workspace.take<float>(p.room_for_scores);
  }
  for (float** vector : {&p.numbers.dot, &p.numbers.square, &p.numbers.norm, &p.numbers.cosine}) {
    *vector = workspace.take<float>(p.room_for_rows);
  }
  p.attended = workspace.take<float>(sizes.differentiating_blocks() * kAttendedQueries * sizes.dim);
  p.differentiating_blocks = sizes.differentiating_blocks();
  p.finishing_blocks = sizes.finishing_blocks();
  const bool sums = sizes.needs_finish();
  p.query_sums = sums && sizes.for_queries ? workspace.take<float>(sizes.query_rows * sizes.dim) : nullptr;
  p.context_sums = sums && sizes.for_contexts ? workspace.take<float>(sizes.context_rows * sizes.dim) : nullptr;
  return zeros;
}

}  // namespace itm_fast::cuda
