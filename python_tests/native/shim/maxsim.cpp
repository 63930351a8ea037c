// The kernels of maxsim_scores in the shim. Each function returns an error message or an empty string.
#include <algorithm>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/maxsim_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

// A small tile, so that few rows fill many tiles.
using SmallTile = ProductTile<16, 32, 1, 2, 2, 40>;

struct Settings {
  uint64_t seed;
  int64_t query_sets, query_rows, context_sets, context_rows, dim, pairs;
  int64_t reduction, direction, longest_query, longest_context;
};

// Runs the kernels that the launcher launches; writes to `counts` the number of launches and the bytes of the
// workspace. `pairs` is null for all pairs. `gradients` is null for the forward, which writes `scores`.
template <typename S, int kParts>
const char* run(const Settings& s, const S* queries, const int64_t* query_offsets, const S* contexts,
                const int64_t* context_offsets, const int64_t* pairs, const float* gradients, float* scores,
                S* of_queries, S* of_contexts, int64_t* counts) {
  const int64_t n_scores = pairs != nullptr ? s.pairs : s.query_sets * s.context_sets;
  const Exact<S> query_values(queries, s.query_rows * s.dim), context_values(contexts, s.context_rows * s.dim);
  const Exact<int64_t> query_bounds(query_offsets, s.query_sets + 1);
  const Exact<int64_t> context_bounds(context_offsets, s.context_sets + 1);
  const Exact<int64_t> listed(pairs, 2 * s.pairs);
  const Exact<float> incoming(gradients, n_scores);
  Exact<float> found(scores, n_scores);
  Exact<S> query_gradients(of_queries, s.query_rows * s.dim), context_gradients(of_contexts, s.context_rows * s.dim);

  MaxsimGradients<S> p{};
  MaxsimProblem<S>& scoring = p.scoring;
  scoring.queries = {query_values.memory, query_bounds.memory, true, s.query_sets, s.query_rows};
  scoring.contexts = {context_values.memory, context_bounds.memory, true, s.context_sets, s.context_rows};
  scoring.dim = s.dim;
  scoring.options = {static_cast<MaxsimReduction>(s.reduction), static_cast<MaxsimDirection>(s.direction)};
  scoring.is_aligned = rows_are_aligned(scoring.queries, scoring.contexts, s.dim);
  scoring.is_listed = pairs != nullptr;
  scoring.pairs = listed.memory;
  scoring.n_pairs = s.pairs;
  scoring.scores = found.memory;
  scoring.gradients = incoming.memory;
  p.of_queries = query_gradients.memory;
  p.of_contexts = context_gradients.memory;
  const auto place = [&](Workspace& workspace) {
    gradients == nullptr ? place_maxsim<SmallTile>(scoring, workspace)
                         : place_maxsim_backward<SmallTile>(scoring, s.longest_query, s.longest_context, workspace);
  };
  Workspace measured;
  place(measured);
  counts[0] = 0;
  counts[1] = measured.bytes();
  std::vector<unsigned char> memory(measured.bytes(), 0xff);
  Workspace workspace(memory.data());
  place(workspace);

  std::string problem;
  const auto launch = [&](int64_t blocks, int threads, auto body, int64_t bytes) {
    if (!problem.empty()) return;
    problem = shim::launch(blocks, threads, s.seed + ++counts[0], body, bytes);
  };
  if (pairs == nullptr) launch(2, SmallTile::kThreads, [&] { plan_maxsim<SmallTile>(scoring); }, 0);
  launch(
      maxsim_blocks(scoring), SmallTile::kThreads, [&] { score_maxsim<kParts, SmallTile>(scoring); },
      MaxsimMemory<SmallTile>::kBytes);
  if (gradients != nullptr) launch(gathering_blocks(p), kGatherThreads, [&] { gather_maxsim(p); }, 0);
  if (scores != nullptr) std::copy_n(found.memory, n_scores, scores);
  if (of_queries != nullptr) std::copy_n(query_gradients.memory, s.query_rows * s.dim, of_queries);
  if (of_contexts != nullptr) std::copy_n(context_gradients.memory, s.context_rows * s.dim, of_contexts);
  return report(problem);
}

}  // namespace

#define ITM_FAST_MAXSIM(S, kParts, name)                                                                               \
  extern "C" const char* maxsim_##name(const Settings* s, const S* queries, const int64_t* query_offsets,              \
                                       const S* contexts, const int64_t* context_offsets, const int64_t* pairs,        \
                                       const float* gradients, float* scores, S* of_queries, S* of_contexts,           \
                                       int64_t* counts) {                                                              \
    return run<S, kParts>(*s, queries, query_offsets, contexts, context_offsets, pairs, gradients, scores, of_queries, \
                          of_contexts, counts);                                                                        \
  }
ITM_FAST_MAXSIM(float, 3, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_MAXSIM(float, 2, float32_as_bf16x3)
ITM_FAST_MAXSIM(BFloat16, 1, bf16)
ITM_FAST_MAXSIM(Half, 1, fp16)
#endif
