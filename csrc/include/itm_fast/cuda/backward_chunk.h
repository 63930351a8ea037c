// The backward of cross_attention_scores: its parameters, and the pairs that are computed together.
#pragma once

#include "itm_fast/cuda/pair_lists.h"
#include "itm_fast/cuda/pair_recompute.h"

namespace itm_fast::cuda {

template <typename S>
struct CrossAttentionBackward {
  PairLists<S> lists;
  PairOptions options;
  int64_t dim;
  float* numbers;  // of the pairs of a chunk
  int64_t room;    // how many
  bool may_need_chunks;
  float* attended;                         // kAttendedQueries vectors per block
  uint16_t* grams;                         // kMatrixParts for each element, see lists.gram_starts
  float* query_factors;                    // (queries.n_rows,): of the queries in their own gradients
  bool is_aligned;                         // rows are aligned to 16 bytes
  S *query_gradients, *context_gradients;  // null if not requested
  float *query_sums, *context_sums;        // gradients so far; null if one chunk holds all pairs
  int32_t* arrived;                        // zero: for the barriers of the grid
  // Gradients of more than this share of all pairs take blocks of scores (block_plan.h). 1 or more: none do, and what
  // follows has no place.
  float dense_share;
  TilePlan query_tiles, context_tiles;
  float* query_norms;   // (queries.n_rows,)
  int32_t* taken;       // for BlockTasks
  int32_t* unsuitable;  // zero at first; whether blocks of scores are refused

  // Null if there is no place for a Gram matrix. The sum of the squares takes its place.
  template <int kParts = kMatrixParts>
  ITM_FAST_DEVICE PartMatrix<kParts> gram_of(int64_t context) const {
    const int64_t start = lists.gram_starts[context];
    if (start < 0) return {nullptr, 0};
    return {grams + start * kMatrixParts, static_cast<int>(padded_parts(lists.contexts.length(context)))};
  }
  // The longest set that has a Gram matrix.
  ITM_FAST_DEVICE int64_t gram_contexts() const { return static_cast<int64_t>(*lists.longest); }
  ITM_FAST_DEVICE PairRows<S> rows_of(const ListedPair& pair) const {
    const int64_t query = lists.queries.offset(pair.query), context = lists.contexts.offset(pair.context);
    return {lists.queries.values + query * dim,
            lists.contexts.values + context * dim,
            gram_of(pair.context),
            static_cast<int>(pair.n_queries),
            static_cast<int>(pair.n_contexts),
            dim,
            is_aligned};
  }
  ITM_FAST_DEVICE float gradient_of(const ListedPair& pair) const {
    return lists.gradients.at(pair.query, pair.context);
  }
  ITM_FAST_DEVICE float* attended_of_block() const { return attended + block_index() * kAttendedQueries * dim; }
};

// Pairs that are computed together: those whose numbers start from `begin` up to `end`, in the order of the lists.
struct PairChunk {
  int32_t index;
  int64_t begin, end;
  bool is_first, is_last;
  int64_t first_pair, last_pair;        // by index, without the last one
  int64_t first_context, last_context;  // the context sets that have them
};

// The chunks of a call. The numbers of the last pair of a chunk may reach past its end by those of the largest pair.
struct PairChunks {
  int64_t count, width;

  template <typename S>
  ITM_FAST_DEVICE explicit PairChunks(const CrossAttentionBackward<S>& p) {
    const int64_t total = *p.lists.total_numbers;
    width =
        total <= p.room || !p.may_need_chunks ? total + 1 : (p.room - static_cast<int64_t>(*p.lists.largest)) / 16 * 16;
    count = total / width + 1;
  }
};

template <typename S>
ITM_FAST_DEVICE PairChunk chunk_of(const PairLists<S>& lists, const PairChunks& chunks, int32_t i) {
  PairChunk chunk{i, i * chunks.width, (i + 1) * chunks.width, i == 0, i + 1 == chunks.count, 0, *lists.total, 0, 0};
  if (!chunk.is_first) chunk.first_pair = first_pair_from(lists, chunk.begin);
  if (!chunk.is_last) chunk.last_pair = first_pair_from(lists, chunk.end);
  if (chunk.first_pair < chunk.last_pair) {
    chunk.first_context = context_of(lists.first_pair, lists.contexts.n_sets, chunk.first_pair);
    chunk.last_context = context_of(lists.first_pair, lists.contexts.n_sets, chunk.last_pair - 1) + 1;
  }
  return chunk;
}

// Only invalid offsets make a chunk of more numbers than the room.
template <typename S>
ITM_FAST_DEVICE bool has_place(const CrossAttentionBackward<S>& p, const PairChunk& chunk, const ListedPair& pair) {
  const int64_t numbers = pair.numbers();
  return numbers <= p.lists.most_numbers && pair.start - chunk.begin + numbers <= p.room;
}

template <typename S>
ITM_FAST_DEVICE PairNumbers numbers_of(const CrossAttentionBackward<S>& p, const PairChunk& chunk,
                                       const ListedPair& pair) {
  return {p.numbers + (pair.start - chunk.begin), pair.n_queries, pair.n_contexts};
}

}  // namespace itm_fast::cuda
