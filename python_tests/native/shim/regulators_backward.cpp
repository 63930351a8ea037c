// The backward of regulated_scores and cross_attention_alignments in the shim. Each function returns an error message
// or an empty string.
#include "itm_fast/cuda/regulation_backward_launch.h"
#include "regulators.h"

namespace {

// A small tile: few rows fill many tiles, and few columns several blocks of outputs.
struct SmallBackwardTile : ProductTile<32, 64, 2, 4, 2, 40> {};

template <typename Tile>
std::string run(const Settings& s, const float* gradients, const float* queries, const int64_t* query_offsets,
                const float* contexts, const int64_t* context_offsets, const float* weights, const int64_t* hidden,
                int64_t n_weights, int64_t room, float* query_gradients, float* context_gradients,
                float* weight_gradients, int64_t* counts) {
  const Operands operands(s, queries, query_offsets, contexts, context_offsets);
  const int64_t size = s.aligns != 0 ? s.context_sets * s.query_rows * s.width : s.query_sets * s.context_sets;
  const Exact<float> incoming(gradients, size);
  const Exact<float> of_queries(queries, s.query_rows * s.dim), of_contexts(contexts, s.context_rows * s.dim);
  const Exact<float> of_weights(weights, n_weights);
  RegulationBackward p{};
  operands.place(s, p.forward);
  p.forward.options.scored = s.scored != 0 && s.aligns == 0;
  Weights given(weights);
  const RegulationSizes sizes{s.width, place_weights(s, hidden, given, p.forward), s.longest(), 0};
  p.gradients = incoming.memory;
  p.aligns = s.aligns != 0;
  p.query_gradients = of_queries.memory;
  p.context_gradients = of_contexts.memory;
  p.weight_gradients = of_weights.memory;
  p.n_weights = n_weights;
  p.n_pairs = counts + 1;
  Workspace measured;
  place_backward<Tile>(p, sizes, measured, room);
  // NaN in every floating type and an out-of-range count, so that reads of uninitialised memory show.
  Exact<unsigned char> memory(nullptr, 0);
  memory.memory = new unsigned char[measured.bytes()];
  std::fill_n(memory.memory, measured.bytes(), static_cast<unsigned char>(0xff));
  Workspace workspace(memory.memory);
  std::fill_n(memory.memory, place_backward<Tile>(p, sizes, workspace, room), static_cast<unsigned char>(0));
  counts[0] = 2;
  counts[2] = measured.bytes();
  counts[3] = p.chunk_rows;
  std::string problem = shim::launch(preparing_blocks(p), Tile::kThreads, s.seed, [&] { prepare_backward<Tile>(p); });
  if (problem.empty()) {
    problem = shim::launch_together(
        s.blocks, Tile::kThreads, s.seed + 1, [&] { differentiate_regulation<Tile>(p); },
        kRegulationBackwardBytes<Tile>);
  }
  std::copy_n(of_queries.memory, s.query_rows * s.dim, query_gradients);
  std::copy_n(of_contexts.memory, s.context_rows * s.dim, context_gradients);
  std::copy_n(of_weights.memory, n_weights, weight_gradients);
  return problem;
}

}  // namespace

// `counts` receives launches, differentiated pairs, bytes of the workspace, and rows of a chunk.
extern "C" const char* regulated_backward(const Settings* s, const float* gradients, const float* queries,
                                          const int64_t* query_offsets, const float* contexts,
                                          const int64_t* context_offsets, const float* weights, const int64_t* hidden,
                                          int64_t n_weights, int64_t room, float* query_gradients,
                                          float* context_gradients, float* weight_gradients, int64_t* counts) {
#ifdef ITM_FAST_SMALL_TILE_ALONE
  const auto kernel = run<SmallBackwardTile>;
#else
  const auto kernel = s->large != 0 ? run<RegulationTile112> : run<SmallBackwardTile>;
#endif
  return report(kernel(*s, gradients, queries, query_offsets, contexts, context_offsets, weights, hidden, n_weights,
                       room, query_gradients, context_gradients, weight_gradients, counts));
}
