// The aggregation regulator: reduces the rows of each pair to one guidance vector, step by step.
#pragma once

#include "itm_fast/cpu/regulator_tile.h"

namespace itm_fast::ITM_FAST_ISA {

typedef uint64_t WordLanes __attribute__((vector_size(kVectorBytes)));

// Dropout factors for the channels at one position: 0, or 1 / (1 - probability). Writes whole blocks of channels.
template <typename T>
inline void dropout_factors(const CounterDropout& dropout, int64_t row, int64_t context, int64_t stream,
                            int64_t n_channels, T* factors) {
  constexpr int kBlocks = kLanes<double>;
  const T kept = T(1) / static_cast<T>(1.0 - dropout.probability);
  for (int64_t first = 0; first < n_channels; first += 4 * kBlocks) {
    WordLanes block;
    for (int i = 0; i < kBlocks; ++i) block[i] = static_cast<uint64_t>(first / 4 + i);
    WordLanes words[4] = {WordLanes{} + static_cast<uint32_t>(row), WordLanes{} + static_cast<uint32_t>(context),
                          WordLanes{} + static_cast<uint32_t>(stream), block};
    philox4x32(words, dropout.key[0], dropout.key[1]);
    for (int word = 0; word < 4; ++word) {
      for (int i = 0; i < kBlocks; ++i) {
        factors[first + 4 * i + word] = words[word][i] < dropout.threshold ? T(0) : kept;
      }
    }
  }
}

// guidance = the mean of the rows.
template <typename T>
inline void mean_of_rows(const T* rows, int64_t stride, int64_t n_rows, int64_t width, T* guidance) {
  for (int64_t i = 0; i < width; i += kLanes<T>) {
    Vector<T> sum{};
    for (int64_t r = 0; r < n_rows; ++r) sum += load(rows + r * stride + i);
    store<T>(guidance + i, sum / static_cast<T>(n_rows));
  }
}

// Softmax of a few logits, in place.
template <typename T>
inline void softmax_of_row(T* logits, int64_t count) {
  T peak = logits[0];
  for (int64_t j = 1; j < count; ++j) peak = peak < logits[j] ? logits[j] : peak;
  T total = T(0);
  for (int64_t j = 0; j < count; ++j) total += logits[j] = std::exp(logits[j] - peak);
  for (int64_t j = 0; j < count; ++j) logits[j] /= total;
}

// One pair in one step: its rows' alignments and their hidden layers tanh(B a + beta), its guidance g and
// tanh(A g + alpha), and its position among all pairs.
template <typename T>
struct AggregatedPair {
  const T *aligned, *local;
  int64_t aligned_stride, local_stride, n_rows;
  const T *guidance, *guide;
  int64_t first_row, context;
};

// weighted = v * drop(tanh(A g + alpha)). `factors` is scratch.
template <typename T>
inline void weigh_guide(const AggregatedPair<T>& pair, const AggregationLayers<T>& layers, int64_t step,
                        const CounterDropout& dropout, T* factors, T* weighted) {
  const int64_t width = layers.b.outputs;
  for (int64_t i = 0; i < width; ++i) weighted[i] = pair.guide[i] * layers.v[i];
  if (dropout.probability == 0.0) return;
  dropout_factors(dropout, pair.first_row, pair.context, 2 * step + 1, width, factors);
  for (int64_t i = 0; i < width; ++i) weighted[i] *= factors[i];
}

// gathered = sum_j w_j a_j, or its mean with the guidance.
template <typename T>
inline void gather(const AggregatedPair<T>& pair, const T* weights, int64_t width, bool residual, T* gathered) {
  for (int64_t i = 0; i < width; i += kLanes<T>) {
    Vector<T> sum{};
    for (int64_t j = 0; j < pair.n_rows; ++j) sum += load(pair.aligned + j * pair.aligned_stride + i) * weights[j];
    if (residual) sum = (load(pair.guidance + i) + sum) * T(0.5);
    store<T>(gathered + i, sum);
  }
}

// Eq 15 and 16 for one pair: weights = w_j, next = sum_j w_j a_j, l2-normalised as the options say, which may overwrite
// the guidance. `weighted` and `factors` are scratch.
template <typename T>
inline void aggregate_pair(const AggregatedPair<T>& pair, const AggregationLayers<T>& layers, int64_t step,
                           const RegulatorOptions& options, T* weighted, T* factors, T* weights, T* next) {
  const int64_t width = layers.b.outputs;
  const CounterDropout& dropout = options.dropout;
  weigh_guide(pair, layers, step, dropout, factors, weighted);
  for (int64_t j = 0; j < pair.n_rows; ++j) {
    const T* local = pair.local + j * pair.local_stride;
    if (dropout.probability > 0.0) {
      dropout_factors(dropout, pair.first_row + j, pair.context, 2 * step, width, factors);
      for (int64_t i = 0; i < width; ++i) factors[i] *= local[i];
      local = factors;
    }
    weights[j] = dot(local, static_cast<const T*>(weighted), width) + *layers.c;
  }
  softmax_of_row(weights, pair.n_rows);
  gather(pair, weights, width, options.residual_aggregation, next);
  if (options.normalize_guidance) make_unit(next, width, next);
}

// The score of one pair, computed from its last guidance. `scored` receives the vector that the layer sees.
template <typename T>
inline T score_of_guidance(const T* guidance, int64_t width, const RegulatorLayers<T>& layers,
                           const RegulatorOptions& options, T* scored) {
  if (options.normalize_mean) make_unit(guidance, width, scored);
  const T* seen = options.normalize_mean ? scored : guidance;
  const T value = dot(seen, layers.u, width) + *layers.u0;
  return options.activation == Activation::tanh ? std::tanh(value) : T(1) / (T(1) + std::exp(-value));
}

}  // namespace itm_fast::ITM_FAST_ISA
