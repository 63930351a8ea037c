// The kernels of regulated_scores and cross_attention_alignments in the shim. Each function returns an error
// message or an empty string.
#include "regulators.h"

namespace {

// A small tile: few rows fill many tiles, few columns several output blocks, and few channels several chunks.
struct SmallRegulationTile : ProductTile<32, 32, 4, 2, 2, 40> {
  static constexpr int kChunk = 64;
};

template <typename S, int kParts, typename Tile>
std::string run(const Settings& s, const float* queries, const int64_t* query_offsets, const float* contexts,
                const int64_t* context_offsets, const float* weights, const int64_t* hidden, float* result,
                int64_t* counts) {
  const int64_t size = s.aligns != 0 ? s.context_sets * s.query_rows * s.width : s.query_sets * s.context_sets;
  Exact<float> found(result, size);
  const Operands operands(s, queries, query_offsets, contexts, context_offsets);
  RegulationProblem<S> p{};
  operands.place(s, p);
  (s.aligns != 0 ? p.alignments : p.scores) = found.memory;
  Weights given(weights);
  const int64_t widest = place_weights(s, hidden, given, p);
  const RegulationSizes sizes{s.width, widest, s.longest(), regulating_blocks<Tile>(p, s.blocks)};
  Workspace measured;
  const int64_t blocks = place_regulation<kParts, Tile>(p, sizes, measured);
  // NaN in every floating type, so that reads of uninitialised memory show.
  Exact<unsigned char> memory(nullptr, 0);
  memory.memory = new unsigned char[measured.bytes()];
  std::fill_n(memory.memory, measured.bytes(), static_cast<unsigned char>(0xff));
  Workspace workspace(memory.memory);
  place_regulation<kParts, Tile>(p, sizes, workspace);
  counts[0] = 0;
  counts[1] = p.slab.bytes;
  std::string problem;
  const auto launch = [&](int64_t blocks, int threads, int64_t bytes, const auto& body) {
    if (!problem.empty()) return;
    problem = shim::launch(blocks, threads, s.seed + counts[0], [&] { body(p); }, bytes);
    ++counts[0];
  };
  using Preparation = std::conditional_t<Tile::kThreads == SetTile::kThreads, Tile, RegulationTile112>;
  launch(preparing_blocks(p), Preparation::kThreads, SetTile::kBytes,
         [](const auto& p) { prepare_regulation<Preparation>(p); });
  launch(blocks, Tile::kThreads, kRegulationBytes<Tile>, [](const auto& p) { regulate_tiles<kParts, Tile>(p); });
  std::copy_n(found.memory, size, result);
  return problem;
}

}  // namespace

#define ITM_FAST_REGULATED(name, S, kParts, LargeTile)                                                                 \
  extern "C" const char* regulated_##name(const Settings* s, const float* queries, const int64_t* query_offsets,       \
                                          const float* contexts, const int64_t* context_offsets, const float* weights, \
                                          const int64_t* hidden, float* result, int64_t* counts) {                     \
    const auto kernel = s->large != 0 ? run<S, kParts, LargeTile> : run<S, kParts, SmallRegulationTile>;               \
    return report(kernel(*s, queries, query_offsets, contexts, context_offsets, weights, hidden, result, counts));     \
  }
#ifdef ITM_FAST_SMALL_TILE_ALONE
template <int>
using LargestTile = SmallRegulationTile;
#else
template <int kParts>
using LargestTile = RegulationTileOf<kParts>;
#endif
ITM_FAST_REGULATED(float32, float, 3, LargestTile<3>)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_REGULATED(bf16, BFloat16, 1, LargestTile<1>)
ITM_FAST_REGULATED(bf16x3, float, 2, LargestTile<2>)
#endif

// Writes the number of blocks of the second launch, at most `s->blocks`, the bytes of the slab of each, and the length
// of the longest context sets with a Gram matrix.
extern "C" const char* slabs(const Settings* s, int64_t hidden, int64_t* found) {
  RegulationProblem<float> p{};
  p.queries.n_sets = s->query_sets;
  p.queries.n_rows = s->query_rows;
  p.contexts.n_sets = s->context_sets;
  p.contexts.n_rows = s->context_rows;
  p.dim = s->dim;
  p.options.n_alignments = s->alignments;
  p.options.normalize_attended = s->normalize_attended != 0;
  p.options.n_correspondences = s->correspondences;
  Workspace measured;
  found[0] = place_regulation<3, RegulationTileOf<3>>(p, {s->width, hidden, s->longest(), s->blocks}, measured);
  found[1] = p.slab.bytes;
  found[2] = p.gram_width;
  return "";
}

// Writes the maximum query rows, contexts and steps that the launchers support, for `n_rows` rows in `n_sets` sets, of
// which the longest has `longest` rows, or 0: unknown.
extern "C" const char* limits(int64_t n_rows, int64_t n_sets, int64_t longest, int64_t* found) {
  const SetRows<float> sets{nullptr, nullptr, true, n_sets, n_rows};
  found[0] = slab_rows(sets, longest, RegulationTileOf<3>::kRows, kMostQueries);
  found[1] = slab_rows(sets, longest, RegulationTileOf<3>::kColumns, kMostContexts);
  found[2] = kMostSteps;
  return "";
}
