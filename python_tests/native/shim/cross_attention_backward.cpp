// The backward of cross_attention_scores in the shim. Each function returns an error message or an empty string.
#include <algorithm>
#include <limits>
#include <string>

#include "exact.h"
#include "itm_fast/cuda/cross_attention_backward_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

struct Settings {
  uint64_t seed;
  int64_t query_sets, query_rows, context_sets, context_rows, dim;
  int64_t for_queries, for_contexts, room;
  double dense_share, temperature, negative_slope, logsumexp_temperature;
  int64_t normalization, focal, aggregation;
  int64_t longest_query, longest_context;  // 0: unknown
  int64_t query_stride, context_stride;    // of the gradients

  CrossAttentionOptions options() const {
    return {temperature,
            negative_slope,
            logsumexp_temperature,
            static_cast<Normalization>(normalization),
            static_cast<Focal>(focal),
            static_cast<Aggregation>(aggregation)};
  }
  BackwardSizes sizes() const {
    return {query_sets,
            query_rows,
            context_sets,
            context_rows,
            dim,
            for_queries != 0,
            for_contexts != 0,
            {longest_query, longest_context},
            room,
            static_cast<float>(dense_share)};
  }
};

// Runs the kernels that the launcher launches; writes to `launches` their number, and 1 if blocks of scores took the
// place of lists, or 2 if they were refused, and the length of the longest context set with a Gram matrix.
template <typename S>
const char* backward(const Settings& s, const float* gradients, const S* queries, const int64_t* query_offsets,
                     const S* contexts, const int64_t* context_offsets, S* query_gradients, S* context_gradients,
                     int64_t* count, int64_t* launches) {
  const BackwardSizes sizes = s.sizes();
  const Exact<float> incoming(gradients, sizes.pairs());
  const Exact<S> query_values(queries, s.query_rows * s.dim), context_values(contexts, s.context_rows * s.dim);
  const Exact<int64_t> query_bounds(query_offsets, s.query_sets + 1);
  const Exact<int64_t> context_bounds(context_offsets, s.context_sets + 1);
  Exact<S> of_queries(sizes.for_queries ? queries : nullptr, s.query_rows * s.dim);
  Exact<S> of_contexts(sizes.for_contexts ? contexts : nullptr, s.context_rows * s.dim);

  CrossAttentionBackward<S> p{};
  p.lists.gradients = {incoming.memory, s.query_stride, s.context_stride};
  p.lists.queries = {query_values.memory, query_bounds.memory, true, s.query_sets, s.query_rows};
  p.lists.contexts = {context_values.memory, context_bounds.memory, true, s.context_sets, s.context_rows};
  p.lists.total = count;
  p.options = PairOptions(s.options());
  p.dim = s.dim;
  p.is_aligned = rows_are_aligned(p.lists.queries, p.lists.contexts, p.dim);
  p.query_gradients = of_queries.memory;
  p.context_gradients = of_contexts.memory;
  Workspace measured;
  place_backward(p, sizes, measured);
  // NaN in every floating type and an out-of-range count, so that reads of uninitialised memory show.
  Exact<unsigned char> memory(nullptr, 0);
  memory.memory = new unsigned char[measured.bytes()];
  std::fill_n(memory.memory, measured.bytes(), static_cast<unsigned char>(0xff));
  Workspace workspace(memory.memory);
  std::fill_n(memory.memory, place_backward(p, sizes, workspace), static_cast<unsigned char>(0));

  std::string problem = shim::launch(sizes.list_blocks(), kListThreads, s.seed, [&] { list_pairs(p.lists); });
  launches[0] = 1;
  // The number of blocks depends on the seed, because a GPU runs as many as are resident together.
  const int64_t blocks = std::min(sizes.propagating_blocks(), static_cast<int64_t>(1 + s.seed % 3));
  if (problem.empty() && blocks > 0) {
    problem =
        shim::launch_together(blocks, kGradientThreads, s.seed + 1, [&] { backpropagate_pairs(p); }, kBackwardBytes);
    ++launches[0];
  }
  // The counter is positive if blocks of scores were taken. Otherwise it has the fill from above and is negative.
  launches[1] = *p.unsuitable != 0 ? 2 : *p.taken > 0 ? 1 : 0;
  launches[2] = static_cast<int64_t>(*p.lists.longest);
  if (sizes.for_queries) std::copy_n(of_queries.memory, s.query_rows * s.dim, query_gradients);
  if (sizes.for_contexts) std::copy_n(of_contexts.memory, s.context_rows * s.dim, context_gradients);
  return report(problem);
}

}  // namespace

#define ITM_FAST_BACKWARD(S, suffix)                                                                               \
  extern "C" const char* cross_attention_backward_##suffix(                                                        \
      const Settings* settings, const float* gradients, const S* queries, const int64_t* query_offsets,            \
      const S* contexts, const int64_t* context_offsets, S* query_gradients, S* context_gradients, int64_t* count, \
      int64_t* launches) {                                                                                         \
    return backward<S>(*settings, gradients, queries, query_offsets, contexts, context_offsets, query_gradients,   \
                       context_gradients, count, launches);                                                        \
  }
ITM_FAST_BACKWARD(float, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_BACKWARD(BFloat16, bfloat16)
ITM_FAST_BACKWARD(Half, float16)
#endif

// Returns the size of the workspace in bytes, for rows of float32 or of 16 bits.
template <typename S>
int64_t workspace_bytes(const Settings& settings) {
  CrossAttentionBackward<S> p{};
  Workspace measured;
  place_backward(p, settings.sizes(), measured);
  return measured.bytes();
}
extern "C" int64_t cross_attention_backward_bytes(const Settings* settings, int64_t element_bytes) {
  return element_bytes == 4 ? workspace_bytes<float>(*settings) : workspace_bytes<BFloat16>(*settings);
}

// Returns how many numbers are kept of a pair of sets.
extern "C" int64_t cross_attention_backward_numbers(int64_t n_queries, int64_t n_contexts) {
  return numbers_of_pair(n_queries, n_contexts);
}
