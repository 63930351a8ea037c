// The kernels of cross_attention that are compiled once per instruction set.
#pragma once

#include "itm_fast/cross_attention.h"

namespace itm_fast {

// One pair of sets that the backward recomputes, and where its results lie.
struct RecomputedPair {
  int64_t query, context;
  int64_t score_gradient;  // offset of its (n_contexts, n_queries) block
  int64_t query_factor;    // offset of its (n_queries) block
};

template <typename T>
struct CrossAttentionKernels {
  // Sizes in elements, for sets or tiles of at most that many rows.
  int64_t (*tile_workspace)(int64_t max_rows, int64_t max_columns, int64_t dim);
  int64_t (*pair_workspace)(int64_t max_contexts, int64_t max_queries);
  int64_t (*gram_size)(int64_t length);

  void (*gram)(const FragmentsView<T>& contexts, int64_t set, T* gram);
  // The queries [first_query, last_query) of a thread's next tiles; max_rows and max_columns as in tile_workspace.
  void (*pack_queries)(const FragmentsView<T>& queries, int64_t first_query, int64_t last_query, int64_t max_rows,
                       int64_t max_columns, T* workspace);
  void (*score_tile)(const FragmentsView<T>& queries, int64_t first_query, int64_t last_query,
                     const FragmentsView<T>& contexts, int64_t first_context, int64_t last_context, const T* gram,
                     const int64_t* gram_offsets, const CrossAttentionOptions& options, int64_t max_rows,
                     int64_t max_columns, T* workspace, T* scores);
  // All pairs of one context set: score gradients and query factors of each, and the gradient of the context's rows
  // unless that is null.
  void (*context_backward)(const FragmentsView<T>& queries, const FragmentsView<T>& contexts, int64_t set,
                           const T* gram, const RecomputedPair* pairs, const T* gradients, int64_t n_pairs,
                           const CrossAttentionOptions& options, int64_t max_contexts, int64_t max_queries,
                           T* workspace, T* score_gradients, T* query_factors, T* context_gradient);
  // The pairs of one query set, in the order given, added to the gradient of the query's rows.
  void (*query_backward)(const FragmentsView<T>& queries, const FragmentsView<T>& contexts, int64_t set,
                         const RecomputedPair* const* pairs, int64_t n_pairs, const T* score_gradients,
                         const T* query_factors, T* query_gradient);
};

#define ITM_FAST_DECLARE(isa)                                        \
  namespace isa {                                                    \
  extern const CrossAttentionKernels<float> kCrossAttentionFloat32;  \
  extern const CrossAttentionKernels<double> kCrossAttentionFloat64; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
