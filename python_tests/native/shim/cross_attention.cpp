// The kernels of cross_attention_scores in the shim. Each function returns an error message or an empty string.
#include <algorithm>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/cross_attention_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

// A small tile, so that few rows fill many tiles; three tiles of rows for two rows of warps.
using SmallScoreTile = ProductTile<48, 64, 2, 4, 3, 40>;

// Blocks for long sets: few, so that each takes several pairs of tiles.
constexpr int64_t kSlabs = 2;

struct Settings {
  uint64_t seed;
  int64_t large, wide_offsets, query_sets, query_rows, context_sets, context_rows, dim;
  int64_t shift;  // elements between a 16-byte boundary and the first row
  double temperature, negative_slope, logsumexp_temperature;
  int64_t normalization, focal, aggregation;
  int64_t longest_query, longest_context;  // 0: unknown

  CrossAttentionOptions options() const {
    return {temperature,
            negative_slope,
            logsumexp_temperature,
            static_cast<Normalization>(normalization),
            static_cast<Focal>(focal),
            static_cast<Aggregation>(aggregation)};
  }
};

// Rows that start `shift` elements after a 16-byte boundary and end with the allocation.
template <typename S>
struct Rows {
  Rows(const void* source, int64_t size, int64_t shift) : memory(size + shift), first(memory.data() + shift) {
    std::copy_n(static_cast<const S*>(source), size, first);
  }
  std::vector<S> memory;
  S* first;
};

template <typename Offset>
std::vector<Offset> narrowed(const int64_t* offsets, int64_t n_sets) {
  return std::vector<Offset>(offsets, offsets + n_sets + 1);
}

template <typename S, int kParts, typename Tile>
std::string run(const Settings& s, const void* queries, const int64_t* query_offsets, const void* contexts,
                const int64_t* context_offsets, float* scores) {
  const Rows<S> query_values(queries, s.query_rows * s.dim, s.shift);
  const Rows<S> context_values(contexts, s.context_rows * s.dim, s.shift);
  const auto wide_queries = narrowed<int64_t>(query_offsets, s.query_sets);
  const auto wide_contexts = narrowed<int64_t>(context_offsets, s.context_sets);
  const auto narrow_queries = narrowed<int32_t>(query_offsets, s.query_sets);
  const auto narrow_contexts = narrowed<int32_t>(context_offsets, s.context_sets);
  const bool wide = s.wide_offsets != 0;
  const auto offsets = [&](const auto& of_64, const auto& of_32) {
    return wide ? static_cast<const void*>(of_64.data()) : static_cast<const void*>(of_32.data());
  };
  Exact<float> found(scores, s.query_sets * s.context_sets);

  ScoreProblem<S> p{};
  p.queries = {query_values.first, offsets(wide_queries, narrow_queries), wide, s.query_sets, s.query_rows};
  p.contexts = {context_values.first, offsets(wide_contexts, narrow_contexts), wide, s.context_sets, s.context_rows};
  p.dim = s.dim;
  p.options = PairOptions(s.options());
  p.is_aligned = rows_are_aligned(p.queries, p.contexts, p.dim);
  p.scores = found.memory;
  LongProblem<S> of_long{p, slab_layout<Tile>(p, {s.longest_query, s.longest_context}), nullptr};
  const bool is_long = has_long_sets<Tile>(of_long.layout);
  const int64_t slabs = long_blocks<Tile>(p, of_long.layout, kSlabs);
  const auto place = [&](Workspace& workspace) {
    if (is_long) {
      place_long<Tile>(of_long, slabs, workspace);
      p = of_long.scoring;
    } else {
      place_scores<Tile>(p, workspace);
    }
  };
  Workspace measured;
  place(measured);
  std::vector<unsigned char> memory(measured.bytes(), 0xff);  // NaN
  Workspace workspace(memory.data());
  place(workspace);
  std::string problem =
      shim::launch(preparing_blocks(p), Tile::kThreads, s.seed, [&] { prepare_scores<Tile>(p); }, SetTile::kBytes);
  if (problem.empty() && is_long) {
    problem = shim::launch(
        slabs, Tile::kThreads, s.seed + 1, [&] { score_long_tiles<kParts, Tile>(of_long); }, kScoreBytes<Tile>);
  } else if (problem.empty()) {
    problem = shim::launch(
        scoring_blocks(p), Tile::kThreads, s.seed + 1, [&] { score_tile<kParts, Tile>(p, block_index()); },
        kScoreBytes<Tile>);
  }
  std::copy_n(found.memory, s.query_sets * s.context_sets, scores);
  return problem;
}

template <typename S, int kParts>
const char* scores_of(const Settings& s, const void* queries, const int64_t* query_offsets, const void* contexts,
                      const int64_t* context_offsets, float* scores) {
#ifndef ITM_FAST_FLOAT32_ALONE
  if (s.large != 0) {
    return report(run<S, kParts, ScoreTile112>(s, queries, query_offsets, contexts, context_offsets, scores));
  }
#endif
  return report(run<S, kParts, SmallScoreTile>(s, queries, query_offsets, contexts, context_offsets, scores));
}

}  // namespace

#define ITM_FAST_SCORES(name, S, kParts)                                                                      \
  extern "C" const char* scores_##name(const Settings* s, const void* queries, const int64_t* query_offsets,  \
                                       const void* contexts, const int64_t* context_offsets, float* scores) { \
    return scores_of<S, kParts>(*s, queries, query_offsets, contexts, context_offsets, scores);               \
  }
ITM_FAST_SCORES(float32, float, 3)
#if !defined(ITM_FAST_FLOAT32_ALONE) || defined(ITM_FAST_AND_BFLOAT16)
ITM_FAST_SCORES(bf16, BFloat16, 1)
#endif
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_SCORES(fp16, Half, 1)
ITM_FAST_SCORES(float32_as_bf16x3, float, 2)
ITM_FAST_SCORES(float32_as_bf16, float, 1)
#endif

// Writes the contexts and queries of a slab of the launcher and the number of slabs of 264 blocks, or zeros.
extern "C" const char* slab(const Settings* s, int64_t* found) {
  ScoreProblem<float> p{};
  p.queries.n_sets = s->query_sets;
  p.queries.n_rows = s->query_rows;
  p.contexts.n_sets = s->context_sets;
  p.contexts.n_rows = s->context_rows;
  const SlabLayout layout = slab_layout<ScoreTile112>(p, {s->longest_query, s->longest_context});
  const bool is_long = has_long_sets<ScoreTile112>(layout);
  found[0] = is_long ? layout.rows : 0;
  found[1] = is_long ? layout.columns : 0;
  found[2] = is_long ? long_blocks<ScoreTile112>(p, layout, 264) : 0;
  return "";
}

// Writes the first set of each tile; `counts`: the number of tiles and its upper bound.
extern "C" const char* plan(int64_t seed, int64_t n_sets, const int64_t* offsets, int64_t max_rows, int64_t* first_sets,
                            int64_t* counts) {
  const Exact<int64_t> given(offsets, n_sets + 1);
  const SetRows<float> sets{nullptr, given.memory, true, n_sets, std::max<int64_t>(given.memory[n_sets], 0)};
  TilePlan plan{nullptr, counts, most_tiles(n_sets, sets.n_rows, max_rows)};
  std::vector<int64_t> found(plan.capacity + 1, -7);
  plan.first_set = found.data();
  const std::string problem = shim::launch(1, 64, seed, [&] { plan_tiles<40>(sets, max_rows, plan); });
  std::copy(found.begin(), found.end(), first_sets);
  counts[1] = plan.capacity;
  return report(problem);
}
