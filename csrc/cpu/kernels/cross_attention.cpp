#include "cpu/kernels/cross_attention.h"

#include <type_traits>

#include "cpu/kernels/product_kernels.h"
#include "itm_fast/cpu/cross_attention_backward.h"

namespace itm_fast::ITM_FAST_ISA {
namespace {

int64_t gram_size(int64_t length) { return round_up(length, kMicroRows) * length; }

// The values of one set in the compute type; `buffer` is not used if they are stored in that type.
template <typename S, typename T>
const T* rows_of(const FragmentsView<S>& view, int64_t set, T* buffer) {
  if constexpr (std::is_same_v<S, T>) {
    return view.set_values(set);
  } else {
    convert(view.set_values(set), view.length(set) * view.dim, buffer);
    return buffer;
  }
}

template <typename S, typename T>
constexpr bool kConverts = !std::is_same_v<S, T>;

template <typename S, typename T>
void gram(const FragmentsView<S>& contexts, int64_t set, T* rows, T* out) {
  gram_matrix(rows_of(contexts, set, rows), contexts.length(set), contexts.dim, out);
}

// After a block's arrays: the raw scores of one pair, and the converted rows of its sets.
template <typename S, typename T>
struct PairLayout : BlockLayout<T> {
  int64_t raw, query_rows, context_rows, end;

  PairLayout(int64_t max_contexts, int64_t max_queries, int64_t dim) : BlockLayout<T>(max_contexts, max_queries) {
    raw = this->total;
    query_rows = raw + max_contexts * this->stride;
    context_rows = query_rows + (kConverts<S, T> ? round_up(max_queries * dim, kLanes<T>) : 0);
    end = context_rows + (kConverts<S, T> ? round_up(max_contexts * dim, kLanes<T>) : 0);
  }
};

template <typename S, typename T>
int64_t pair_workspace(int64_t max_contexts, int64_t max_queries, int64_t dim) {
  return PairLayout<S, T>(max_contexts, max_queries, dim).end;
}

// dX += (h P P') X with the sum that differentiate_block has computed.
template <typename T>
void add_gram_gradient(const BlockLayout<T>& layout, const T* workspace, const T* context, int64_t length, int64_t dim,
                       T* context_gradient) {
  add_product(workspace + layout.gram_gradient, layout.gram_stride, int64_t{1}, length, length, context, dim,
              context_gradient);
}

template <typename S, typename T>
void context_backward(const FragmentsView<S>& queries, const FragmentsView<S>& contexts, int64_t set, const T* gram,
                      const RecomputedPair* pairs, const T* gradients, int64_t n_pairs,
                      const CrossAttentionOptions& options, int64_t max_contexts, int64_t max_queries, T* workspace,
                      T* score_gradients, T* query_factors, T* context_gradient) {
  const PairLayout<S, T> layout(max_contexts, max_queries, contexts.dim);
  const int64_t length = contexts.length(set), dim = contexts.dim;
  const T* context = rows_of(contexts, set, workspace + layout.context_rows);
  T* raw = workspace + layout.raw;
  T* gram_gradient = workspace + layout.gram_gradient;
  for (int64_t i = 0; i < length * layout.gram_stride; ++i) gram_gradient[i] = T(0);
  for (int64_t i = 0; i < n_pairs; ++i) {
    const RecomputedPair& pair = pairs[i];
    const int64_t n_queries = queries.length(pair.query);
    const T* query = rows_of(queries, pair.query, workspace + layout.query_rows);
    T* score_gradient = score_gradients + pair.score_gradient;
    dot_products(context, length, query, n_queries, dim, raw, layout.stride);
    for (int64_t k = 0; k < length; ++k) {
      for (int64_t j = n_queries; j < layout.stride; ++j) raw[k * layout.stride + j] = T(0);
    }
    const QueryBlock<T, T> block{query, queries.offsets + pair.query, gradients + i, 0, 1};
    differentiate_block(block, raw, layout.stride, context, length, dim, gram, options, layout, workspace,
                        score_gradient, n_queries, query_factors + pair.query_factor);
    if (context_gradient == nullptr) continue;
    add_product(score_gradient, n_queries, int64_t{1}, length, n_queries, query, dim, context_gradient);
  }
  if (context_gradient == nullptr) return;
  add_gram_gradient(layout, workspace, context, length, dim, context_gradient);
}

template <typename S, typename T>
void query_backward(const FragmentsView<S>& queries, const FragmentsView<S>& contexts, int64_t set,
                    const RecomputedPair* const* pairs, int64_t n_pairs, const T* score_gradients,
                    const T* query_factors, T* rows, T* query_gradient) {
  const int64_t length = queries.length(set), dim = queries.dim;
  for (int64_t i = 0; i < n_pairs; ++i) {
    const RecomputedPair& pair = *pairs[i];
    add_product(score_gradients + pair.score_gradient, int64_t{1}, length, length, contexts.length(pair.context),
                rows_of(contexts, pair.context, rows), dim, query_gradient);
  }
  const S* query = queries.set_values(set);
  for (int64_t j = 0; j < length; ++j) {
    T factor = T(0);
    for (int64_t i = 0; i < n_pairs; ++i) factor += query_factors[pairs[i]->query_factor + j];
    for (int64_t d = 0; d < dim; ++d) query_gradient[j * dim + d] += factor * widen(query[j * dim + d]);
  }
}

template <typename T>
int64_t block_workspace(int64_t max_contexts, int64_t max_columns) {
  return BlockLayout<T>(max_contexts, max_columns).total;
}

template <typename S, typename T>
void differentiate_context(const FragmentsView<S>& queries, const int64_t* query_runs, int64_t n_runs,
                           const FragmentsView<S>& contexts, int64_t set, const T* gram, const T* gradients,
                           int64_t gradient_stride, const CrossAttentionOptions& options, int64_t max_contexts,
                           int64_t max_columns, T* rows, T* workspace, T* raw, int64_t raw_stride, T* query_factors,
                           T* context_gradient) {
  const BlockLayout<T> layout(max_contexts, max_columns);
  const int64_t length = contexts.length(set);
  T* gram_gradient = workspace + layout.gram_gradient;
  for (int64_t i = 0; i < length * layout.gram_stride; ++i) gram_gradient[i] = T(0);
  for (int64_t run = 0; run < n_runs; ++run) {
    const int64_t first = query_runs[run], column = queries.offsets[first];
    const QueryBlock<T, S> block{queries.set_values(first), queries.offsets + first,
                                 gradients + first * gradient_stride, gradient_stride, query_runs[run + 1] - first};
    differentiate_block(block, raw + column, raw_stride, contexts.set_values(set), length, contexts.dim, gram, options,
                        layout, workspace, raw + column, raw_stride, query_factors + column);
  }
  if (context_gradient == nullptr) return;
  add_gram_gradient(layout, workspace, rows_of(contexts, set, rows), length, contexts.dim, context_gradient);
}

template <typename S, typename T>
void add_query_factors(const FragmentsView<S>& queries, int64_t first, int64_t last, const T* factors,
                       int64_t n_factors, int64_t factor_stride, T* gradient) {
  const int64_t dim = queries.dim;
  for (int64_t j = first; j < last; ++j) {
    T factor = T(0);
    for (int64_t i = 0; i < n_factors; ++i) factor += factors[i * factor_stride + j];
    T* out = gradient + (j - first) * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] += factor * widen(queries.values[j * dim + d]);
  }
}

template <typename S, typename T>
void narrow_values(const T* values, int64_t count, S* out) {
  if constexpr (kConverts<S, T>) convert(values, count, out);
}

template <typename S, typename T>
bool all_finite(const S* values, int64_t count) {
  Vector<T> zeros{};  // NaN from the first non-finite value on
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) zeros += load(values + i) * T(0);
  T zero = sum_lanes<T>(zeros);
  for (; i < count; ++i) zero += widen(values[i]) * T(0);
  return zero == T(0);
}

template <typename S, typename T>
constexpr CrossAttentionKernels<S, T> kKernels{ProductsBy<Exact<T>, S>::kTable,
                                               gram_size,
                                               gram<S, T>,
                                               pair_workspace<S, T>,
                                               context_backward<S, T>,
                                               query_backward<S, T>,
                                               block_workspace<T>,
                                               differentiate_context<S, T>,
                                               add_query_factors<S, T>,
                                               narrow_values<S, T>,
                                               all_finite<S, T>};

}  // namespace

const CrossAttentionKernels<float, float> kCrossAttentionFloat32 = kKernels<float, float>;
const CrossAttentionKernels<double, double> kCrossAttentionFloat64 = kKernels<double, double>;
const CrossAttentionKernels<BFloat16, float> kCrossAttentionBFloat16 = kKernels<BFloat16, float>;

}  // namespace itm_fast::ITM_FAST_ISA
