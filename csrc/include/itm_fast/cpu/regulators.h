// Regulated cross-attention on the CPU, tile by tile: only scores, or the last alignments, leave a tile.
//
// The steps and their order are those of the reference, `alignment_steps` and `regulate`. Products of a tile's rows
// with packed weights take nearly all the time.
#pragma once

#include "itm_fast/cpu/regulator_aggregation.h"
#include "itm_fast/cpu/regulator_attention.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename Product>
class Regulation {
 protected:
  using T = typename Product::Value;

 public:
  Regulation(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace, bool keeps_steps = false)
      : problem_(problem),
        tile_(tile),
        options_(problem.options),
        layers_(problem.layers),
        layout_(problem.sizes, problem.options, keeps_steps),
        workspace_(workspace),
        n_rows_(tile.n_rows),
        n_steps_(larger(options_.n_alignments, options_.n_correspondences)),
        dim_(problem.queries.dim),
        width_(problem.sizes.width) {
    attention_ = options_.attention;
    temperature_ = options_.learned_factors ? *layers_.temperature : static_cast<T>(attention_.temperature);
    attention_.temperature = 1.0;
  }

  void score(T* scores) {
    run_steps();
    for_each_pair([&](const Pair& pair) {
      score_of(scores, pair) = options_.scored
                                   ? score_of_guidance(at(layout_.guidance[options_.n_aggregations], pair.index),
                                                       width_, layers_, options_, at(layout_.scored, pair.index))
                                   : mean_cosine(pair);
    });
  }

  void align(int64_t n_query_rows, T* alignments) {
    for (int64_t step = 0; step < n_steps_; ++step) regulate_attention(step);
    for_each_slice([&](const RegulatorSlice& slice) {
      for (int64_t j = 0; j < slice_rows(slice); ++j) {
        T* out = alignments + (slice.context * n_query_rows + first_row(slice) + j) * width_;
        __builtin_memcpy(out, at(layout_.aligned[n_steps_ - 1], slice.row + j), width_ * sizeof(T));
      }
    });
  }

 protected:
  // A pair of non-empty sets. Guidance vectors have the order of the pairs.
  struct Pair {
    int64_t query, context, index, n_rows;
    int64_t row, query_row;  // its first row in the tile, and the first row of its queries in the call
  };

  // Everything up to the score's layer, or up to the last attended vectors.
  void run_steps() {
    for (int64_t step = 0; step < n_steps_; ++step) {
      regulate_attention(step);
      if (!options_.interleaved) continue;
      if (step == 0) take_means(step);
      aggregate(step, step);
    }
    if (!options_.scored) return attend_all(n_steps_);
    if (options_.interleaved) return;
    take_means(n_steps_ - 1);
    for (int64_t step = 0; step < options_.n_aggregations; ++step) aggregate(step, n_steps_ - 1);
  }

  T* at(int64_t array, int64_t row, int64_t stride) const { return workspace_ + array + row * stride; }
  // A row of an array of alignments or guidance vectors.
  T* at(int64_t array, int64_t row) const { return at(array, row, layout_.width_stride); }
  T* wide(int64_t array, int64_t row) const { return at(array, row, layout_.dim_stride); }
  T* chunk() const { return workspace_ + layout_.chunk; }
  T& score_of(T* scores, const Pair& pair) const {
    return scores[pair.query * problem_.contexts.n_sets + pair.context];
  }

  int64_t first_row(const RegulatorSlice& slice) const { return problem_.queries.offsets[slice.first_query]; }
  int64_t slice_rows(const RegulatorSlice& slice) const {
    return problem_.queries.offsets[slice.last_query] - first_row(slice);
  }
  const T* slice_queries(const RegulatorSlice& slice) const { return problem_.queries.set_values(slice.first_query); }

  template <typename Body>
  void for_each_slice(const Body& body) const {
    for (const RegulatorSlice* slice = tile_.first; slice < tile_.last; ++slice) body(*slice);
  }

  // Calls body(row of the tile, its query row).
  template <typename Body>
  void for_each_row(const Body& body) const {
    for_each_slice([&](const RegulatorSlice& slice) {
      const T* query = slice_queries(slice);
      for (int64_t j = 0; j < slice_rows(slice); ++j) body(slice.row + j, query + j * dim_);
    });
  }

  template <typename Body>
  int64_t for_each_pair(const Body& body) const {
    int64_t count = 0;
    for_each_slice([&](const RegulatorSlice& slice) {
      if (problem_.contexts.length(slice.context) == 0) return;
      for (int64_t query = slice.first_query; query < slice.last_query; ++query) {
        const int64_t n = problem_.queries.length(query), first = problem_.queries.offsets[query];
        if (n == 0) continue;
        body(Pair{query, slice.context, count, n, slice.row + first - first_row(slice), first});
        ++count;
      }
    });
    return count;
  }

  void regulate_attention(int64_t step) {
    if (step < options_.n_alignments) {
      attend_all(step);
      align_rows(step, layers_.alignments[step]);
    }
    if (step < options_.n_correspondences) correspond(step, layers_.correspondences[step]);
  }

  // Whether attention `step` has channel factors for each row, from RCR, or the same for all rows, learned.
  bool has_row_factors(int64_t step) const { return step > 0 && options_.n_correspondences > 0; }
  bool has_channels(int64_t step) const { return has_row_factors(step) || options_.learned_factors; }
  const T* channels_of(int64_t step, int64_t row) const {
    return has_row_factors(step) ? wide(layout_.channels[step], row) : layers_.channels;
  }
  SliceTemperatures<T> temperatures_of(int64_t step, int64_t row) const {
    return {has_row_factors(step) ? workspace_ + layout_.temperatures[step] + row : nullptr, temperature_};
  }

  void pack(int64_t context) {
    if (packed_ == context) return;
    pack_context<Product>(problem_.contexts.set_values(context), problem_.contexts.length(context), dim_, layout_,
                          workspace_);
    packed_ = context;
  }

  // Computes every row's attended vector with the current factors.
  void attend_all(int64_t step) {
    for_each_slice([&](const RegulatorSlice& slice) {
      T* attended = wide(layout_.attended[step], slice.row);
      const T* rows = slice_queries(slice);
      const int64_t n_rows = slice_rows(slice);
      int64_t stride = dim_;
      if (has_channels(step)) {
        for (int64_t j = 0; j < n_rows; ++j) {
          multiply_rows(rows + j * dim_, channels_of(step, slice.row + j), dim_, attended + j * layout_.dim_stride);
        }
        rows = attended;
        stride = layout_.dim_stride;
      }
      pack(slice.context);
      const int64_t* sets = problem_.queries.offsets;
      attend_slice<Product>(rows, stride, sets + slice.first_query, sets + slice.last_query,
                            problem_.contexts.length(slice.context), dim_, temperatures_of(step, slice.row), attention_,
                            layout_, workspace_, at(layout_.raw[step], slice.row, layout_.context_stride),
                            at(layout_.attention[step], slice.row, layout_.context_stride), attended);
    });
  }

  // What an attended vector of this norm is multiplied with in Eq 7.
  T attended_scale(T norm) const {
    return options_.normalize_attended ? T(1) / (norm + static_cast<T>(kNormEpsilon)) : T(1);
  }

  // Eq 7.
  void align_rows(int64_t step, const RegulatorLayer<T>& layer) {
    for_each_row([&](int64_t row, const T* query) {
      const T* attended = wide(layout_.attended[step], row);
      T* squares = wide(layout_.squares[step], row);
      const T scale = attended_scale(row_norm(attended, dim_));
      int64_t d = 0;
      for (; d + kLanes<T> <= dim_; d += kLanes<T>) {
        const Vector<T> difference = load(query + d) - load(attended + d) * scale;
        store<T>(squares + d, difference * difference);
      }
      for (; d < dim_; ++d) {
        const T difference = query[d] - attended[d] * scale;
        squares[d] = difference * difference;
      }
    });
    multiply_packed<Product>(workspace_ + layout_.squares[step], layout_.dim_stride, n_rows_, dim_, layer.packed,
                             width_, chunk(), workspace_ + layout_.aligned[step], layout_.width_stride);
    for (int64_t row = 0; row < n_rows_; ++row) {
      T* vector = at(layout_.aligned[step], row);
      for (int64_t i = 0; i < width_; i += kLanes<T>) store<T>(vector + i, load(vector + i) + load(layer.bias + i));
      workspace_[layout_.aligned_norms[step] + row] = make_unit(vector, width_, vector);
    }
  }

  // out = tanh(seen weight^T + bias) for the input of RCR.
  void see(int64_t step, const RegulatorLayer<T>& layer, int64_t out) {
    const int64_t stride = layout_.hidden_stride;
    if (!options_.sees_query) {
      hidden_layer<Product>(workspace_ + layout_.aligned[step], layout_.width_stride, n_rows_, layer, chunk(),
                            workspace_ + out, stride);
      return;
    }
    for_each_slice([&](const RegulatorSlice& slice) {
      hidden_layer<Product>(slice_queries(slice), dim_, slice_rows(slice), layer, chunk(), at(out, slice.row, stride),
                            stride);
    });
  }

  // The channel factors after a step, before they are bounded; `factors` are those before it.
  Vector<T> changed_channels(int64_t step, const T* change, const T* factors, int64_t d) const {
    const Vector<T> value = load(change + d);
    if (!options_.residual_correspondence) return value;
    if (!has_channels(step)) return value + T(1);
    return value + (has_row_factors(step) ? load(factors + d) : load_some(factors + d, dim_ - d));
  }

  // Eq 8.
  void correspond(int64_t step, const CorrespondenceLayers<T>& layers) {
    const T* before = workspace_ + layout_.temperatures[step];
    T* temperatures = workspace_ + layout_.temperatures[step + 1];
    see(step, layers.w3, layout_.narrow[step]);
    for (int64_t row = 0; row < n_rows_; ++row) {
      const T* narrow = at(layout_.narrow[step], row, layout_.hidden_stride);
      T shift = dot(narrow, layers.w4, layers.w3.outputs) + *layers.b4;
      if (options_.residual_correspondence) shift += has_row_factors(step) ? before[row] : temperature_;
      temperatures[row] = shift < T(0) ? T(0) : shift;
    }
    see(step, layers.w1, layout_.hidden[step]);
    hidden_layer<Product>(workspace_ + layout_.hidden[step], layout_.hidden_stride, n_rows_, layers.w2, chunk(),
                          workspace_ + layout_.changes[step], layout_.dim_stride);
    for (int64_t row = 0; row < n_rows_; ++row) {
      const T *change = wide(layout_.changes[step], row), *factors = channels_of(step, row);
      T* channels = wide(layout_.channels[step + 1], row);
      for (int64_t d = 0; d < dim_; d += kLanes<T>) {
        Vector<T> value = changed_channels(step, change, factors, d);
        value = value < splat(T(-1)) ? splat(T(-1)) : value;
        store<T>(channels + d, value > splat(T(1)) ? splat(T(1)) : value);
      }
    }
  }

  // Eq 5.
  T mean_cosine(const Pair& pair) const {
    T total = T(0);
    for (int64_t j = 0; j < pair.n_rows; ++j) {
      const T* query = problem_.queries.values + (pair.query_row + j) * dim_;
      const T* attended = wide(layout_.attended[n_steps_], pair.row + j);
      const T norms = row_norm(query, dim_) * row_norm(attended, dim_), least = static_cast<T>(kNormEpsilon);
      total += dot(query, attended, dim_) / (norms < least ? least : norms);
    }
    return total / static_cast<T>(pair.n_rows);
  }

  void take_means(int64_t step) {
    for_each_pair([&](const Pair& pair) {
      mean_of_rows(static_cast<const T*>(at(layout_.aligned[step], pair.row)), layout_.width_stride, pair.n_rows,
                   width_, at(layout_.guidance[0], pair.index));
    });
  }

  AggregatedPair<T> aggregated_pair(const Pair& pair, int64_t step, int64_t aligned_step) const {
    return {at(layout_.aligned[aligned_step], pair.row),
            at(layout_.local[step], pair.row, layout_.hidden_stride),
            layout_.width_stride,
            layout_.hidden_stride,
            pair.n_rows,
            at(layout_.guidance[step], pair.index),
            at(layout_.guide[step], pair.index),
            pair.query_row,
            pair.context};
  }

  void aggregate(int64_t step, int64_t aligned_step) {
    const AggregationLayers<T>& layers = layers_.aggregations[step];
    const int64_t n_pairs = for_each_pair([](const Pair&) {});
    hidden_layer<Product>(workspace_ + layout_.guidance[step], layout_.width_stride, n_pairs, layers.a, chunk(),
                          workspace_ + layout_.guide[step], layout_.width_stride);
    hidden_layer<Product>(workspace_ + layout_.aligned[aligned_step], layout_.width_stride, n_rows_, layers.b, chunk(),
                          workspace_ + layout_.local[step], layout_.hidden_stride);
    for_each_pair([&](const Pair& pair) {
      aggregate_pair(aggregated_pair(pair, step, aligned_step), layers, step, options_, workspace_ + layout_.weighted,
                     workspace_ + layout_.factors, workspace_ + layout_.logits[step] + pair.row,
                     at(layout_.guidance[step + 1], pair.index));
    });
  }

  const RegulatorProblem<T>& problem_;
  const RegulatorTile& tile_;
  const RegulatorOptions& options_;
  const RegulatorLayers<T>& layers_;
  const RegulatorLayout<Product> layout_;
  T* workspace_;
  const int64_t n_rows_, n_steps_, dim_, width_;
  CrossAttentionOptions attention_;  // without the temperature, which differs by row
  T temperature_;                    // of the first attention
  int64_t packed_ = -1;              // the packed context set
};

}  // namespace itm_fast::ITM_FAST_ISA
