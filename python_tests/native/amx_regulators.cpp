// Runs the AMX kernels of the regulators on any processor: compiled with ITM_FAST_AMX_SIMULATED, called by ctypes.
#include <deque>
#include <utility>
#include <vector>

#include "cpu/kernels/regulators.h"
#include "itm_fast/cpu/simd.h"

namespace itm_fast::amx {
namespace {

// Packs the weights of a call, given in the order of `RegulatorParameters.tensors()`.
class Weights {
 public:
  Weights(const RegulatorKernels<float>& kernels, const float* const* weights) : kernels_(kernels), next_(weights) {}

  const float* plain() { return *next_++; }

  RegulatorLayer<float> layer(int64_t outputs, int64_t inputs) {
    std::vector<float>& packed = memory_.emplace_back(kernels_.packed_size(outputs, inputs), -1e30f);
    std::vector<float> line(kLineCells);
    kernels_.pack(plain(), outputs, inputs, line.data(), packed.data());
    std::vector<float>& bias = memory_.emplace_back((outputs / kBiasStep + 1) * kBiasStep, 0.0f);
    const float* values = plain();
    for (int64_t i = 0; i < outputs; ++i) bias[i] = values[i];
    return {packed.data(), nullptr, bias.data(), outputs, inputs};
  }

 private:
  const RegulatorKernels<float>& kernels_;
  const float* const* next_;
  std::deque<std::vector<float>> memory_;
};

// Interleaved RCR and RAR with `steps` aggregations.
void scores(const RegulatorKernels<float>& kernels, const FragmentsView<float>& queries,
            const FragmentsView<float>& contexts, int64_t steps, int64_t width, const float* const* weights,
            float* out) {
  Weights source(kernels, weights);
  std::vector<RegulatorLayer<float>> alignments;
  std::vector<CorrespondenceLayers<float>> correspondences;
  std::vector<AggregationLayers<float>> aggregations;
  const int64_t dim = queries.dim, wide = 2 * width, narrow = width / 2;
  for (int64_t i = 0; i < steps; ++i) alignments.push_back(source.layer(width, dim));
  for (int64_t i = 0; i + 1 < steps; ++i) {
    CorrespondenceLayers<float> layers{};
    layers.w1 = source.layer(wide, width);
    layers.w2 = source.layer(dim, wide);
    layers.w3 = source.layer(narrow, width);
    layers.w4 = source.plain();
    layers.b4 = source.plain();
    correspondences.push_back(layers);
  }
  for (int64_t i = 0; i < steps; ++i) {
    AggregationLayers<float> layers{};
    layers.a = source.layer(width, width);
    layers.b = source.layer(width, width);
    layers.v = source.plain();
    layers.c = source.plain();
    aggregations.push_back(layers);
  }
  RegulatorProblem<float> problem{queries, contexts, {}, {}, {}};
  RegulatorOptions& options = problem.options;
  options.attention = {10.0, 0.1, 1.0, Normalization::clipped_l2norm, Focal::none, Aggregation::mean};
  options.n_alignments = options.n_aggregations = steps;
  options.n_correspondences = steps - 1;
  options.scored = options.residual_correspondence = true;
  options.normalize_attended = options.normalize_guidance = true;
  options.interleaved = steps > 1;
  problem.layers = {alignments.data(), correspondences.data(), aggregations.data(), nullptr, nullptr, nullptr, nullptr};
  problem.layers.u = source.plain();
  problem.layers.u0 = source.plain();
  const int64_t n_rows = queries.offsets[queries.n_sets], half = contexts.n_sets / 2;
  problem.sizes = {
      n_rows * (contexts.n_sets - half), n_rows, contexts.offsets[contexts.n_sets], dim, width, wide, steps > 1};
  std::vector<float> workspace(kernels.workspace(problem.sizes, options), -1e30f);
  for (const auto& [first, last] : {std::pair{int64_t{0}, half}, std::pair{half, contexts.n_sets}}) {
    std::vector<RegulatorSlice> slices;
    for (int64_t set = first; set < last; ++set) slices.push_back({0, queries.n_sets, set, (set - first) * n_rows});
    const RegulatorTile tile{slices.data(), slices.data() + slices.size(), (last - first) * n_rows};
    kernels.score_tile(problem, tile, workspace.data(), out);
  }
}

}  // namespace
}  // namespace itm_fast::amx

extern "C" void amx_regulated_scores(int64_t parts, const float* queries, const int64_t* query_offsets,
                                     int64_t n_queries, const float* contexts, const int64_t* context_offsets,
                                     int64_t n_contexts, int64_t dim, int64_t steps, int64_t width,
                                     const float* const* weights, float* out) {
  const auto& tables = itm_fast::amx::kLowPrecisionRegulators;
  itm_fast::amx::scores(parts == 1 ? tables.bf16 : tables.bf16x3, {queries, query_offsets, n_queries, dim},
                        {contexts, context_offsets, n_contexts, dim}, steps, width, weights, out);
}

// The hyperbolic tangent shared by all instruction sets; `count` is a multiple of the lanes.
extern "C" void vector_tanh(const float* values, int64_t count, float* out) {
  using namespace itm_fast::amx;
  for (int64_t i = 0; i < count; i += kLanes<float>) store<float>(out + i, tanh_vector(load(values + i)));
}
