// Shared by the drivers of the regulators' kernels: settings, operands and weights of a call.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/regulation_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

struct Settings {
  uint64_t seed;
  int64_t large, wide_offsets, blocks, aligns;
  int64_t query_sets, query_rows, context_sets, context_rows, dim, width;
  int64_t alignments, correspondences, aggregations, scored, learned_factors, tanh_activation;
  int64_t normalize_mean, normalize_attended, normalize_guidance;
  int64_t interleaved, sees_query, residual_correspondence, residual_aggregation;
  double temperature, negative_slope;
  int64_t normalization, focal;
  double dropout;
  int64_t dropout_seed;
  int64_t longest_query, longest_context;  // 0: unknown

  LongestSets longest() const { return {longest_query, longest_context}; }
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
    options.normalize_attended = normalize_attended != 0;
    options.normalize_guidance = normalize_guidance != 0;
    options.activation = tanh_activation != 0 ? Activation::tanh : Activation::sigmoid;
    return options;
  }
};

// The rows and offsets of a call, each in memory of its exact size.
class Operands {
 public:
  Operands(const Settings& s, const float* queries, const int64_t* query_offsets, const float* contexts,
           const int64_t* context_offsets)
      : query_values_(queries, s.query_rows * s.dim),
        context_values_(contexts, s.context_rows * s.dim),
        wide_queries_(query_offsets, s.query_sets + 1),
        wide_contexts_(context_offsets, s.context_sets + 1),
        narrow_queries_(query_offsets, query_offsets + s.query_sets + 1),
        narrow_contexts_(context_offsets, context_offsets + s.context_sets + 1),
        dropout_seed_(&s.dropout_seed, 1) {}

  template <typename S>
  void place(const Settings& s, RegulationProblem<S>& p) const {
    const bool wide = s.wide_offsets != 0;
    const auto offsets = [&](const auto& of_64, const auto& of_32) {
      return wide ? static_cast<const void*>(of_64.memory) : static_cast<const void*>(of_32.data());
    };
    p.queries = {query_values_.memory, offsets(wide_queries_, narrow_queries_), wide, s.query_sets, s.query_rows};
    p.contexts = {context_values_.memory, offsets(wide_contexts_, narrow_contexts_), wide, s.context_sets,
                  s.context_rows};
    p.dim = s.dim;
    p.is_aligned = rows_are_aligned(p.contexts, p.contexts, p.dim);
    p.options = s.options();
    p.attention = PairOptions(p.options.attention);
    p.seed = s.dropout > 0.0 ? dropout_seed_.memory : nullptr;
  }

 private:
  const Exact<float> query_values_, context_values_;
  const Exact<int64_t> wide_queries_, wide_contexts_;
  const std::vector<int32_t> narrow_queries_, narrow_contexts_;
  const Exact<int64_t> dropout_seed_;
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
    widest = std::max({widest, wide, narrow});
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

}  // namespace
