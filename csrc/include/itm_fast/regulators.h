// Shared by every backend of the regulators: the setting of a call, views of the weights, and tiles.
#pragma once

#include "itm_fast/cross_attention.h"
#include "itm_fast/philox.h"

namespace itm_fast {

enum class Activation : int32_t { sigmoid, tanh };

struct RegulatorOptions {
  CrossAttentionOptions attention;  // except its aggregation
  CounterDropout dropout;           // inside RAR
  int64_t n_alignments, n_correspondences, n_aggregations;
  bool scored;           // by a learned layer; else the score is the mean cosine
  bool learned_factors;  // of the first attention
  bool interleaved;      // aggregations alternate with correspondences
  bool sees_query;       // RCR sees the query instead of the alignment
  bool residual_correspondence, residual_aggregation, normalize_mean;
  bool normalize_attended, normalize_guidance;  // of Eq 7 and 16
  Activation activation;

  // Whether an attention without alignments follows the last step.
  constexpr bool ends_in_cosines() const { return !scored && n_alignments <= n_correspondences; }
};

// A linear layer: its weight (outputs, inputs) packed, its bias padded with zeros to a multiple of kBiasStep. The
// backward also needs the weight packed for products with rows of outputs; in the forward `transposed` is null.
template <typename T>
struct RegulatorLayer {
  const T *packed, *transposed;
  const T* bias;
  int64_t outputs, inputs;
};

inline constexpr int64_t kBiasStep = 32;

template <typename T>
struct CorrespondenceLayers {
  RegulatorLayer<T> w1, w2, w3;
  const T *w4, *b4;
};

template <typename T>
struct AggregationLayers {
  RegulatorLayer<T> a, b;
  const T *v, *c;
};

// As many layers as the options require, or null.
template <typename T>
struct RegulatorLayers {
  const RegulatorLayer<T>* alignments;
  const CorrespondenceLayers<T>* correspondences;
  const AggregationLayers<T>* aggregations;
  const T *u, *u0;
  const T *channels, *temperature;
};

// The maximum over all tiles.
struct RegulatorSizes {
  int64_t rows;        // per tile
  int64_t query_rows;  // per slice
  int64_t contexts;    // per context set
  int64_t dim, width;  // of rows and of alignments
  int64_t hidden;      // outputs of the widest hidden layer
  bool has_channels;   // factors of RCR, or learned ones
};

template <typename T>
struct RegulatorProblem {
  FragmentsView<T> queries, contexts;
  RegulatorOptions options;
  RegulatorLayers<T> layers;
  RegulatorSizes sizes;
};

// Adjacent query sets with one context set. A tile has one row for each query row of a slice.
struct RegulatorSlice {
  int64_t first_query, last_query, context;
  int64_t row;  // its first row in the tile
};

// Slices, ordered by context set.
struct RegulatorTile {
  const RegulatorSlice *first, *last;
  int64_t n_rows;
};

}  // namespace itm_fast
