#include "cpu/kernels/cross_attention.h"

#include "itm_fast/cpu/cross_attention_backward.h"

namespace itm_fast::ITM_FAST_ISA {
namespace {

template <typename T>
int64_t tile_workspace(int64_t max_rows, int64_t max_columns, int64_t dim) {
  return TileLayout<T>(max_rows, max_columns, dim).total;
}

template <typename T>
int64_t pair_workspace(int64_t max_contexts, int64_t max_queries) {
  const PairLayout<T> layout(max_contexts, max_queries);
  return layout.total + max_contexts * layout.gram_stride;
}

int64_t gram_size(int64_t length) { return round_up(length, kMicroRows) * length; }

template <typename T>
void gram(const FragmentsView<T>& contexts, int64_t set, T* out) {
  gram_matrix(contexts.set_values(set), contexts.length(set), contexts.dim, out);
}

template <typename T>
void pack(const FragmentsView<T>& queries, int64_t first_query, int64_t last_query, int64_t max_rows,
          int64_t max_columns, T* workspace) {
  const TileLayout<T> layout(max_rows, max_columns, queries.dim);
  const int64_t n_rows = queries.offsets[last_query] - queries.offsets[first_query];
  pack_queries(queries.set_values(first_query), n_rows, queries.dim, workspace + layout.panels,
               workspace + layout.query_norms);
}

template <typename T>
void score(const FragmentsView<T>& queries, int64_t first_query, int64_t last_query, const FragmentsView<T>& contexts,
           int64_t first_context, int64_t last_context, const T* gram, const int64_t* gram_offsets,
           const CrossAttentionOptions& options, int64_t max_rows, int64_t max_columns, T* workspace, T* scores) {
  const TileLayout<T> layout(max_rows, max_columns, queries.dim);
  score_tile(queries, first_query, last_query, contexts, first_context, last_context, gram, gram_offsets, options,
             layout, workspace, scores);
}

template <typename T>
void context_backward(const FragmentsView<T>& queries, const FragmentsView<T>& contexts, int64_t set, const T* gram,
                      const RecomputedPair* pairs, const T* gradients, int64_t n_pairs,
                      const CrossAttentionOptions& options, int64_t max_contexts, int64_t max_queries, T* workspace,
                      T* score_gradients, T* query_factors, T* context_gradient) {
  const PairLayout<T> layout(max_contexts, max_queries);
  const int64_t length = contexts.length(set), dim = contexts.dim;
  const T* context = contexts.set_values(set);
  T* gram_gradient = workspace + layout.total;
  for (int64_t i = 0; i < length * layout.gram_stride; ++i) gram_gradient[i] = T(0);
  for (int64_t i = 0; i < n_pairs; ++i) {
    const RecomputedPair& pair = pairs[i];
    const int64_t n_queries = queries.length(pair.query);
    const T* query = queries.set_values(pair.query);
    T* score_gradient = score_gradients + pair.score_gradient;
    differentiate_pair(query, n_queries, context, length, dim, gram, gradients[i], options, layout, workspace,
                       score_gradient, query_factors + pair.query_factor, gram_gradient);
    if (context_gradient == nullptr) continue;
    add_product(score_gradient, n_queries, int64_t{1}, length, n_queries, query, dim, context_gradient);
  }
  if (context_gradient == nullptr) return;
  add_product(gram_gradient, layout.gram_stride, int64_t{1}, length, length, context, dim, context_gradient);
}

template <typename T>
void query_backward(const FragmentsView<T>& queries, const FragmentsView<T>& contexts, int64_t set,
                    const RecomputedPair* const* pairs, int64_t n_pairs, const T* score_gradients,
                    const T* query_factors, T* query_gradient) {
  const int64_t length = queries.length(set), dim = queries.dim;
  const T* query = queries.set_values(set);
  for (int64_t i = 0; i < n_pairs; ++i) {
    const RecomputedPair& pair = *pairs[i];
    add_product(score_gradients + pair.score_gradient, int64_t{1}, length, length, contexts.length(pair.context),
                contexts.set_values(pair.context), dim, query_gradient);
  }
  for (int64_t j = 0; j < length; ++j) {
    T factor = T(0);
    for (int64_t i = 0; i < n_pairs; ++i) factor += query_factors[pairs[i]->query_factor + j];
    for (int64_t d = 0; d < dim; ++d) query_gradient[j * dim + d] += factor * query[j * dim + d];
  }
}

template <typename T>
constexpr CrossAttentionKernels<T> kKernels{tile_workspace<T>, pair_workspace<T>,   gram_size,        gram<T>, pack<T>,
                                            score<T>,          context_backward<T>, query_backward<T>};

}  // namespace

const CrossAttentionKernels<float> kCrossAttentionFloat32 = kKernels<float>;
const CrossAttentionKernels<double> kCrossAttentionFloat64 = kKernels<double>;

}  // namespace itm_fast::ITM_FAST_ISA
