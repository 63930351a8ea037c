// The kernels of regulated_scores and cross_attention_alignments in the shim. Each function returns an error
// message or an empty string.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/regulation_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

// A small tile: few rows fill many tiles, few columns several output blocks, and few channels several chunks.
struct SmallRegulationTile : ProductTile<32, 32, 2, 1, 2, 40> {
  static constexpr int kChunk = 64;
};

struct Settings {
  uint64_t seed;
  int64_t large, wide_offsets, blocks, aligns;
  int64_t query_sets, query_rows, context_sets, context_rows, dim, width;
  int64_t alignments, correspondences, aggregations, scored, learned_factors, tanh_activation, normalize_mean;
  int64_t interleaved, sees_query, residual_correspondence, residual_aggregation;
  double temperature, negative_slope;
  int64_t normalization, focal;
  double dropout;
  int64_t dropout_seed;

  RegulatorOptions options() const {
    RegulatorOptions options{};
    options.attention = {
        temperature,      negative_slope, 1.0, static_cast<Normalization>(normalization), static_cast<Focal>(focal),
        Aggregation::mean};
    options.dropout = {dropout, static_cast<uint64_t>(dropout * 4294967296.0), {0, 0}};
    options.n_alignments = alignments;
    options.n_correspondences = correspondences;
    options.n_aggregations = aggregations;
    options.scored = scored != 0;
    options.learned_factors = learned_factors != 0;
    options.interleaved = interleaved != 0;
    options.sees_query = sees_query != 0;
    options.residual_correspondence = residual_correspondence != 0;
    options.residual_aggregation = residual_aggregation != 0;
    options.normalize_mean = normalize_mean != 0;
    options.activation = tanh_activation != 0 ? Activation::tanh : Activation::sigmoid;
    return options;
  }
};

// Returns the weights one after the other, each in memory of its exact size.
class Weights {
 public:
  explicit Weights(const float* source) : source_(source) {}
  const float* next(int64_t size) {
    kept_.push_back(std::make_unique<Exact<float>>(source_, size));
    source_ += size;
    return kept_.back()->memory;
  }
  template <typename S>
  LayerOperand<S> layer(int64_t outputs, int64_t inputs) {
    const float* weight = next(outputs * inputs);
    return {weight, next(outputs), nullptr, static_cast<int32_t>(outputs), static_cast<int32_t>(inputs)};
  }
  VectorLayer vector(int64_t inputs) {
    const float* weight = next(inputs);
    return {weight, next(1)};
  }

 private:
  const float* source_;
  std::vector<std::unique_ptr<Exact<float>>> kept_;
};

// `hidden`: the output widths of w1 and w3 of each correspondence.
template <typename S>
int64_t place_weights(const Settings& s, const int64_t* hidden, Weights& weights, RegulationProblem<S>& p) {
  int64_t count = 0, widest = 0;
  const int64_t seen = s.sees_query != 0 ? s.dim : s.width;
  for (int64_t i = 0; i < s.alignments; ++i) p.layers[count++] = weights.layer<S>(s.width, s.dim);
  for (int64_t i = 0; i < s.correspondences; ++i) {
    const int64_t wide = hidden[2 * i], narrow = hidden[2 * i + 1];
    p.layers[count++] = weights.layer<S>(wide, seen);
    p.layers[count++] = weights.layer<S>(s.dim, wide);
    p.layers[count++] = weights.layer<S>(narrow, seen);
    p.shifts[i] = weights.vector(narrow);
    widest = std::max(widest, wide);
  }
  for (int64_t i = 0; i < s.aggregations; ++i) {
    p.layers[count++] = weights.layer<S>(s.width, s.width);
    p.layers[count++] = weights.layer<S>(s.width, s.width);
    p.attentiveness[i] = weights.vector(s.width);
  }
  if (s.scored != 0) p.score = weights.vector(s.width);
  if (s.learned_factors != 0) {
    p.channels = weights.next(s.dim);
    p.temperature = weights.next(1);
  }
  return widest;
}

template <typename S, int kParts, typename Tile>
std::string run(const Settings& s, const float* queries, const int64_t* query_offsets, const float* contexts,
                const int64_t* context_offsets, const float* weights, const int64_t* hidden, float* result,
                int64_t* counts) {
  const Exact<float> query_values(queries, s.query_rows * s.dim), context_values(contexts, s.context_rows * s.dim);
  const Exact<int64_t> wide_queries(query_offsets, s.query_sets + 1),
      wide_contexts(context_offsets, s.context_sets + 1);
  const std::vector<int32_t> narrow_queries(query_offsets, query_offsets + s.query_sets + 1);
  const std::vector<int32_t> narrow_contexts(context_offsets, context_offsets + s.context_sets + 1);
  const int64_t size = s.aligns != 0 ? s.context_sets * s.query_rows * s.width : s.query_sets * s.context_sets;
  Exact<float> found(result, size);
  const Exact<int64_t> dropout_seed(&s.dropout_seed, 1);

  RegulationProblem<S> p{};
  const auto offsets = [&](const auto& of_64, const auto& of_32) {
    return s.wide_offsets != 0 ? static_cast<const void*>(of_64.memory) : static_cast<const void*>(of_32.data());
  };
  const bool wide = s.wide_offsets != 0;
  p.queries = {query_values.memory, offsets(wide_queries, narrow_queries), wide, s.query_sets, s.query_rows};
  p.contexts = {context_values.memory, offsets(wide_contexts, narrow_contexts), wide, s.context_sets, s.context_rows};
  p.dim = s.dim;
  p.options = s.options();
  p.attention = PairOptions(p.options.attention);
  p.seed = s.dropout > 0.0 ? dropout_seed.memory : nullptr;
  (s.aligns != 0 ? p.alignments : p.scores) = found.memory;
  Weights given(weights);
  const int64_t widest = place_weights(s, hidden, given, p);
  const RegulationSizes sizes{s.width, widest, regulating_blocks<Tile>(p, s.blocks)};
  Workspace measured;
  place_regulation<Tile>(p, sizes, measured);
  // NaN in every floating type, so that reads of uninitialised memory show.
  Exact<unsigned char> memory(nullptr, 0);
  memory.memory = new unsigned char[measured.bytes()];
  std::fill_n(memory.memory, measured.bytes(), static_cast<unsigned char>(0xff));
  Workspace workspace(memory.memory);
  place_regulation<Tile>(p, sizes, workspace);
  counts[0] = 0;
  counts[1] = p.slab.bytes;
  std::string problem;
  const auto launch = [&](int64_t blocks, int64_t bytes, const auto& body) {
    if (!problem.empty()) return;
    problem = shim::launch(blocks, Tile::kThreads, s.seed + counts[0], [&] { body(p); }, bytes);
    ++counts[0];
  };
  launch(preparing_blocks(p), 0, [](const auto& p) { prepare_regulation<Tile>(p); });
  launch(sizes.blocks, kRegulationBytes<Tile>, [](const auto& p) { regulate_tiles<kParts, Tile>(p); });
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
using LargestTile = SmallRegulationTile;
#else
using LargestTile = RegulationTile112;
#endif
ITM_FAST_REGULATED(float32, float, 3, LargestTile)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_REGULATED(bf16, BFloat16, 1, LargestTile)
ITM_FAST_REGULATED(bf16x3, float, 2, SmallRegulationTile)
#endif

// Writes the maximum query rows, contexts and steps of the kernel that the launchers use.
extern "C" const char* limits(int64_t* found) {
  found[0] = RegulationTile112::kRows;
  found[1] = RegulationTile112::kColumns;
  found[2] = kMostSteps;
  return "";
}
