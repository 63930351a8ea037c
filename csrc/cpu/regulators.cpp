// regulated_scores and cross_attention_alignments on the CPU, tile by tile.
#include <torch/csrc/stable/library.h>

#include "cpu/packed_regulators.h"
#include "ops/cross_attention.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

const LowPrecisionRegulators* low_precision_regulators() {
  switch (selected_isa()) {
#ifdef ITM_FAST_HAVE_AMX
    case Isa::amx:
      return &amx::kLowPrecisionRegulators;
    case Isa::avx512_bf16:
      return &avx512_bf16::kLowPrecisionRegulators;
#endif
    default:
      return nullptr;
  }
}

// The fastest kernels that are at least as precise as requested.
template <typename T>
const RegulatorKernels<T>& regulator_kernels([[maybe_unused]] const std::string& precision) {
  if constexpr (std::is_same_v<T, float>) {
    if (const LowPrecisionRegulators* low = low_precision_regulators()) {
      if (precision == "bf16") return low->bf16;
      if (precision == "bf16x3" && low->bf16x3.pack != nullptr) return low->bf16x3;
    }
  }
  return exact_kernels(T{});
}

// Tiles of a run of query sets, each with `step` context sets.
struct TiledRun {
  int64_t first_query, last_query, n_rows;
  int64_t step, first_tile;
};

// Every query set with every context set.
template <typename T>
std::vector<TiledRun> cut_into_tiles(const FragmentsView<T>& queries, int64_t n_contexts, int64_t tile_rows,
                                     RegulatorSizes& sizes, int64_t& n_tiles) {
  std::vector<TiledRun> tiled;
  const std::vector<int64_t> runs = cut_into_runs(queries, 0, queries.n_sets, tile_rows);
  n_tiles = 0;
  for (size_t run = 0; run + 1 < runs.size(); ++run) {
    const int64_t n_rows = queries.offsets[runs[run + 1]] - queries.offsets[runs[run]];
    if (n_rows == 0) continue;
    const int64_t step = std::clamp<int64_t>(tile_rows / n_rows, 1, std::max<int64_t>(n_contexts, 1));
    tiled.push_back({runs[run], runs[run + 1], n_rows, step, n_tiles});
    n_tiles += (n_contexts + step - 1) / step;
    sizes.rows = std::max(sizes.rows, step * n_rows);
    sizes.query_rows = std::max(sizes.query_rows, n_rows);
  }
  return tiled;
}

// Calls run(problem, tile, workspace) for all tiles.
template <typename T, typename Run>
void run_tiles(const Operand<T>& queries, const Operand<T>& contexts, const RegulatorWeights& weights,
               const RegulatorOptions& options, const RegulatorKernels<T>& kernels, const Run& run) {
  const PackedRegulators<T> packed(weights, options, kernels);
  RegulatorProblem<T> problem{queries.view, contexts.view, options, packed.layers,
                              regulator_sizes(queries, contexts, weights, options)};
  const int64_t n_contexts = contexts.view.n_sets;
  int64_t n_tiles;
  const std::vector<TiledRun> tiled =
      cut_into_tiles(queries.view, n_contexts, kernels.tile_rows, problem.sizes, n_tiles);
  struct State {
    Buffer<T> workspace;
    std::vector<RegulatorSlice> slices;
  };
  const int64_t workspace_size = kernels.workspace(problem.sizes, options);
  share_tasks<State>(
      n_tiles, [&] { return State{Buffer<T>(workspace_size), {}}; },
      [&](int64_t index, State& state) {
        const TiledRun& part =
            *std::prev(std::upper_bound(tiled.begin(), tiled.end(), index,
                                        [](int64_t tile, const TiledRun& other) { return tile < other.first_tile; }));
        const int64_t first = (index - part.first_tile) * part.step, last = std::min(first + part.step, n_contexts);
        state.slices.clear();
        for (int64_t context = first; context < last; ++context) {
          state.slices.push_back({part.first_query, part.last_query, context, (context - first) * part.n_rows});
        }
        const RegulatorSlice* slices = state.slices.data();
        const RegulatorTile tile{slices, slices + (last - first), (last - first) * part.n_rows};
        run(problem, tile, state.workspace.data());
      });
}

template <typename T>
Tensor scores_of(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                 const Tensor& context_offsets, const RegulatorWeights& weights, const RegulatorOptions& options,
                 const std::string& precision) {
  const RegulatorKernels<T>& kernels = regulator_kernels<T>(precision);
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  Tensor scores = torch::stable::new_zeros(queries, {query.view.n_sets, context.view.n_sets}, kScalarType<T>);
  auto* out = static_cast<T*>(scores.mutable_data_ptr());
  run_tiles(query, context, weights, options, kernels,
            [&](const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace) {
              kernels.score_tile(problem, tile, workspace, out);
            });
  return scores;
}

template <typename T>
Tensor alignments_of(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                     const Tensor& context_offsets, const RegulatorWeights& weights, const RegulatorOptions& options,
                     const std::string& precision) {
  const RegulatorKernels<T>& kernels = regulator_kernels<T>(precision);
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  const int64_t n_rows = queries.size(0);
  // If the offsets do not end at the number of rows, some rows belong to no set; they stay zero.
  Tensor alignments = torch::stable::new_zeros(queries, {context.view.n_sets, n_rows, weights.width}, kScalarType<T>);
  auto* out = static_cast<T*>(alignments.mutable_data_ptr());
  run_tiles(query, context, weights, options, kernels,
            [&](const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace) {
              kernels.align_tile(problem, tile, n_rows, workspace, out);
            });
  return alignments;
}

Tensor regulated_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                        const Tensor& context_offsets, std::vector<Tensor> weights, int64_t alignments,
                        int64_t correspondences, int64_t aggregations, bool scored, bool learned_factors,
                        const std::string& activation, bool normalize_mean, bool normalize_attended,
                        bool normalize_guidance, const std::string& schedule, bool residual_correspondence,
                        bool residual_aggregation, const std::string& correspondence_input, double temperature,
                        double negative_slope, const std::string& focal, double dropout, std::optional<Tensor> seed,
                        const std::string& precision, int64_t /*longest_query*/, int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  RegulatorOptions options =
      regulator_options({alignments, correspondences, aggregations, scored, learned_factors, activation, normalize_mean,
                         normalize_attended, normalize_guidance, schedule, residual_correspondence,
                         residual_aggregation, correspondence_input},
                        cross_attention_options(temperature, "clipped_l2norm", negative_slope, focal, "mean", 1.0));
  options.dropout = counter_dropout(dropout, seed, queries);
  if (dropout > 0.0) options.dropout.set_key(*static_cast<const int64_t*>(seed->const_data_ptr()));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  if (queries.scalar_type() == torch::headeronly::ScalarType::Double) {
    return scores_of<double>(queries, query_offsets, contexts, context_offsets, checked, options, precision);
  }
  return scores_of<float>(queries, query_offsets, contexts, context_offsets, checked, options, precision);
}

Tensor cross_attention_alignments(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                                  const Tensor& context_offsets, std::vector<Tensor> weights, int64_t correspondences,
                                  bool residual_correspondence, double temperature, const std::string& normalization,
                                  double negative_slope, const std::string& focal, const std::string& precision,
                                  int64_t /*longest_query*/, int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const RegulatorOptions options =
      alignment_options(correspondences, residual_correspondence,
                        cross_attention_options(temperature, normalization, negative_slope, focal, "mean", 1.0));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  if (queries.scalar_type() == torch::headeronly::ScalarType::Double) {
    return alignments_of<double>(queries, query_offsets, contexts, context_offsets, checked, options, precision);
  }
  return alignments_of<float>(queries, query_offsets, contexts, context_offsets, checked, options, precision);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("regulated_scores", TORCH_BOX(&itm_fast::regulated_scores));
  m.impl("cross_attention_alignments", TORCH_BOX(&itm_fast::cross_attention_alignments));
}
