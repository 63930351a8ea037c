// The kernels of maxsim_scores, compiled once per instruction set. S is the storage type of rows, T the type of scores.
#pragma once

#include "itm_fast/bfloat16.h"
#include "itm_fast/cross_attention.h"
#include "itm_fast/maxsim.h"

namespace itm_fast {

// `max_columns` is the most query rows that are packed at a time; workspaces are in elements of T.
template <typename S, typename T>
struct MaxsimKernels {
  int64_t (*workspace)(int64_t max_columns, int64_t dim);
  void (*pack)(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query, int64_t max_columns,
               T* workspace);
  // Scores of the packed query sets [first_query, last_query) with context sets [first_context, last_context):
  // scores[query * stride + context], counted from the first ones. `sums` holds one number per query set.
  void (*score)(const FragmentsView<S>& queries, int64_t first_query, int64_t last_query,
                const FragmentsView<S>& contexts, int64_t first_context, int64_t last_context, MaxsimOptions options,
                int64_t max_columns, T* workspace, double* sums, T* scores, int64_t stride);
  // The best context row of each row of a packed query set, and the best query row of each context row; null: not
  // wanted.
  void (*match)(const FragmentsView<S>& queries, int64_t query, const FragmentsView<S>& contexts, int64_t context,
                int64_t max_columns, T* workspace, int32_t* by_query, int32_t* by_context);
  // gradient[i] += weight * rows[matches[i]], or gradient[matches[i]] += weight * rows[i] if `scatter`, for i < count.
  void (*add_matches)(const int32_t* matches, int64_t count, bool scatter, T weight, const S* rows, int64_t dim,
                      T* gradient);
};

#define ITM_FAST_DECLARE(isa)                                  \
  namespace isa {                                              \
  extern const MaxsimKernels<float, float> kMaxsimFloat32;     \
  extern const MaxsimKernels<double, double> kMaxsimFloat64;   \
  extern const MaxsimKernels<BFloat16, float> kMaxsimBFloat16; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

// Products of bfloat16, for processors with instructions for them.
struct LowPrecisionMaxsim {
  MaxsimKernels<float, float> bf16;
  MaxsimKernels<BFloat16, float> bf16_of_bf16;
};

#define ITM_FAST_DECLARE(isa)                          \
  namespace isa {                                      \
  extern const LowPrecisionMaxsim kLowPrecisionMaxsim; \
  }
ITM_FAST_DECLARE(avx512_bf16)
ITM_FAST_DECLARE(amx)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
