// The kernels of cross_attention, compiled once per instruction set. S is the storage type of rows, T the type of sums
// and scores.
#pragma once

#include "itm_fast/bfloat16.h"
#include "itm_fast/cross_attention.h"

namespace itm_fast {

// The functions that depend on how products are computed. Sizes are in elements of T, for tiles of at most max_rows
// context rows and max_columns query rows.
template <typename S, typename T>
struct ProductKernels {
  int64_t tile_rows;  // context rows of a tile, unless one set has more
  int64_t (*tile_workspace)(int64_t max_rows, int64_t max_columns, int64_t dim);
  // Packs the queries [first_query, last_query) of a thread's next tiles.
  void (*pack_queries)(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query, int64_t max_rows,
                       int64_t max_columns, T* workspace);
  void (*score_tile)(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                     const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context, const T* gram,
                     const int64_t* gram_offsets, const CrossAttentionOptions& options, int64_t max_rows,
                     int64_t max_columns, T* workspace, T* scores);

  // Backward of whole rows of pairs, for finite values: pairs without a gradient are multiplied by zero.
  // Raw scores of one tile, with queries packed as for the forward.
  void (*raw_tile)(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                   const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context, int64_t max_rows,
                   int64_t max_columns, T* workspace, T* raw, int64_t raw_stride);
  // gradient (n_rows, dim) += score gradients (n_rows, n_factors), or their transpose, times factors (n_factors, dim).
  int64_t (*rows_workspace)(int64_t max_rows);
  void (*add_rows)(const T* score_gradients, int64_t stride, bool transposed, int64_t n_rows, int64_t n_factors,
                   const S* factors, int64_t dim, int64_t max_rows, T* workspace, T* gradient);
};

// One pair of sets that the backward recomputes, and the offsets of its results.
struct RecomputedPair {
  int64_t query, context;
  int64_t score_gradient;  // offset of its (n_contexts, n_queries) block
  int64_t query_factor;    // offset of its (n_queries) block
};

template <typename S, typename T>
struct CrossAttentionKernels {
  ProductKernels<S, T> products;  // in T

  // Gram matrix of one context set; `rows` holds the set's values if S is not T.
  int64_t (*gram_size)(int64_t length);
  void (*gram)(const FragmentsView<S>& contexts, int64_t set, T* rows, T* gram);

  // Backward, pair by pair, for all pairs of one context set. Computes score gradients and query factors of each pair,
  // and the gradient of the context's rows unless it is null.
  int64_t (*pair_workspace)(int64_t max_contexts, int64_t max_queries, int64_t dim);
  void (*context_backward)(const FragmentsView<S>& queries, const FragmentsView<S>& contexts, int64_t set,
                           const T* gram, const RecomputedPair* pairs, const T* gradients, int64_t n_pairs,
                           const CrossAttentionOptions& options, int64_t max_contexts, int64_t max_queries,
                           T* workspace, T* score_gradients, T* query_factors, T* context_gradient);
  // Adds the pairs of one query set, in the given order, to the gradient of the query's rows.
  void (*query_backward)(const FragmentsView<S>& queries, const FragmentsView<S>& contexts, int64_t set,
                         const RecomputedPair* const* pairs, int64_t n_pairs, const T* score_gradients,
                         const T* query_factors, T* rows, T* query_gradient);

  // Backward of whole rows of pairs. Turns the raw scores of one context set with all queries into their gradient, in
  // runs of query sets that begin at the sets query_runs[0 .. n_runs]. `gradients` holds the gradients of this
  // context's scores, `gradient_stride` apart.
  int64_t (*block_workspace)(int64_t max_contexts, int64_t max_columns);
  void (*differentiate_context)(const FragmentsView<S>& queries, const int64_t* query_runs, int64_t n_runs,
                                const FragmentsView<S>& contexts, int64_t set, const T* gram, const T* gradients,
                                int64_t gradient_stride, const CrossAttentionOptions& options, int64_t max_contexts,
                                int64_t max_columns, T* rows, T* workspace, T* raw, int64_t raw_stride,
                                T* query_factors, T* context_gradient);
  // Adds the part of the queries' gradient that flows through their norms to rows [first, last): each row times the sum
  // of its `n_factors` factors, which are factor_stride apart.
  void (*add_query_factors)(const FragmentsView<S>& queries, int64_t first, int64_t last, const T* factors,
                            int64_t n_factors, int64_t factor_stride, T* gradient);

  void (*narrow)(const T* values, int64_t count, S* out);
  bool (*all_finite)(const S* values, int64_t count);
};

#define ITM_FAST_DECLARE(isa)                                                  \
  namespace isa {                                                              \
  extern const CrossAttentionKernels<float, float> kCrossAttentionFloat32;     \
  extern const CrossAttentionKernels<double, double> kCrossAttentionFloat64;   \
  extern const CrossAttentionKernels<BFloat16, float> kCrossAttentionBFloat16; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

// Products of bfloat16, for processors with instructions for them. A null score_tile marks products that would be
// slower than float32.
struct LowPrecisionProducts {
  ProductKernels<float, float> bf16, bf16x3;
  ProductKernels<BFloat16, float> bf16_of_bf16;
};

#define ITM_FAST_DECLARE(isa)                              \
  namespace isa {                                          \
  extern const LowPrecisionProducts kLowPrecisionProducts; \
  }
ITM_FAST_DECLARE(avx512_bf16)
ITM_FAST_DECLARE(amx)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
