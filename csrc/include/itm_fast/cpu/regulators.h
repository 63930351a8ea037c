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
  using T = typename Product::Value;

 public:
  Regulation(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace)
      : problem_(problem),
        tile_(tile),
        options_(problem.options),
        layers_(problem.layers),
        layout_(problem.sizes),
        workspace_(workspace),
        first_set_(problem.queries.offsets + tile.first_query),
        last_set_(problem.queries.offsets + tile.last_query),
        slice_rows_(*last_set_ - *first_set_),
        n_rows_(slice_rows_ * (tile.last_context - tile.first_context)),
        query_(problem.queries.set_values(tile.first_query)),
        dim_(problem.queries.dim),
        width_(problem.sizes.width) {
    attention_ = options_.attention;
    temperature_ = options_.learned_factors ? *layers_.temperature : static_cast<T>(attention_.temperature);
    attention_.temperature = 1.0;
  }

  void score(T* scores) {
    const bool interleaved = options_.interleaved;
    for (int64_t step = 0; step < n_steps(); ++step) {
      regulate_attention(step);
      if (!interleaved) continue;
      if (step == 0) take_means();
      aggregate(step);
    }
    if (!options_.scored) {
      attend_all();
      for_each_pair([&](const Pair& pair) { score_of(scores, pair) = mean_cosine(pair); });
      return;
    }
    if (!interleaved) {
      take_means();
      for (int64_t step = 0; step < options_.n_aggregations; ++step) aggregate(step);
    }
    for_each_pair([&](const Pair& pair) {
      score_of(scores, pair) = score_of_guidance(pair.guidance, width_, layers_, options_);
    });
  }

  void align(int64_t n_query_rows, T* alignments) {
    for (int64_t step = 0; step < n_steps(); ++step) regulate_attention(step);
    for_each_slice([&](int64_t context, int64_t row) {
      for (int64_t j = 0; j < slice_rows_; ++j) {
        T* out = alignments + (context * n_query_rows + *first_set_ + j) * width_;
        __builtin_memcpy(out, at(layout_.aligned, row + j, layout_.width_stride), width_ * sizeof(T));
      }
    });
  }

 private:
  // A pair of non-empty sets. Guidance vectors have the order of the pairs.
  struct Pair {
    int64_t query, context, n_rows;
    int64_t row, query_row;  // its first row in the tile, and the first row of its queries in the call
    T *guidance, *guide;
  };

  T* at(int64_t array, int64_t row, int64_t stride) const { return workspace_ + array + row * stride; }
  T* chunk() const { return workspace_ + layout_.chunk; }
  const T* query_row(int64_t row) const { return query_ + row % slice_rows_ * dim_; }
  T& score_of(T* scores, const Pair& pair) const {
    return scores[pair.query * problem_.contexts.n_sets + pair.context];
  }
  int64_t n_steps() const { return larger(options_.n_alignments, options_.n_correspondences); }

  // Calls body(context set, first row of its slice).
  template <typename Body>
  void for_each_slice(const Body& body) const {
    int64_t row = 0;
    for (int64_t context = tile_.first_context; context < tile_.last_context; ++context, row += slice_rows_) {
      body(context, row);
    }
  }

  template <typename Body>
  int64_t for_each_pair(const Body& body) const {
    int64_t count = 0;
    for_each_slice([&](int64_t context, int64_t row) {
      if (problem_.contexts.length(context) == 0) return;
      for (int64_t query = tile_.first_query; query < tile_.last_query; ++query) {
        const int64_t n = problem_.queries.length(query), first = problem_.queries.offsets[query];
        if (n == 0) continue;
        body(Pair{query, context, n, row + first - *first_set_, first,
                  at(layout_.guidance, count, layout_.width_stride), at(layout_.guide, count, layout_.width_stride)});
        ++count;
      }
    });
    return count;
  }

  void regulate_attention(int64_t step) {
    if (step < options_.n_alignments) {
      attend_all();
      align_rows(layers_.alignments[step]);
    }
    if (step < options_.n_correspondences) correspond(layers_.correspondences[step]);
  }

  // Computes every row's attended vector with the current factors.
  void attend_all() {
    for_each_slice([&](int64_t context, int64_t row) {
      T* wide = at(layout_.wide, row, layout_.dim_stride);
      const T* rows = query_;
      int64_t stride = dim_;
      if (changed_ || options_.learned_factors) {
        for (int64_t j = 0; j < slice_rows_; ++j) reweight(row + j);
        rows = wide;
        stride = layout_.dim_stride;
      }
      const int64_t length = problem_.contexts.length(context);
      if (packed_ != context) {
        pack_context<Product>(problem_.contexts.set_values(context), length, dim_, layout_, workspace_);
        packed_ = context;
      }
      const SliceTemperatures<T> temperatures{changed_ ? workspace_ + layout_.temperatures + row : nullptr,
                                              temperature_};
      attend_slice<Product>(rows, stride, first_set_, last_set_, length, dim_, temperatures, attention_, layout_,
                            workspace_, wide);
    });
  }

  void reweight(int64_t row) {
    const T* channels = changed_ ? at(layout_.channels, row, layout_.dim_stride) : layers_.channels;
    const T* query = query_row(row);
    T* wide = at(layout_.wide, row, layout_.dim_stride);
    int64_t d = 0;
    for (; d + kLanes<T> <= dim_; d += kLanes<T>) store<T>(wide + d, load(query + d) * load(channels + d));
    for (; d < dim_; ++d) wide[d] = query[d] * channels[d];
  }

  // Eq 7.
  void align_rows(const RegulatorLayer<T>& layer) {
    for (int64_t row = 0; row < n_rows_; ++row) {
      const T* query = query_row(row);
      T* wide = at(layout_.wide, row, layout_.dim_stride);
      const T scale = T(1) / (row_norm(wide, dim_) + static_cast<T>(kNormEpsilon));
      int64_t d = 0;
      for (; d + kLanes<T> <= dim_; d += kLanes<T>) {
        const Vector<T> difference = load(query + d) - load(wide + d) * scale;
        store<T>(wide + d, difference * difference);
      }
      for (; d < dim_; ++d) {
        const T difference = query[d] - wide[d] * scale;
        wide[d] = difference * difference;
      }
    }
    T* aligned = workspace_ + layout_.aligned;
    multiply_packed<Product>(workspace_ + layout_.wide, layout_.dim_stride, n_rows_, dim_, layer.packed, width_,
                             chunk(), aligned, layout_.width_stride);
    for (int64_t row = 0; row < n_rows_; ++row) {
      T* vector = at(layout_.aligned, row, layout_.width_stride);
      for (int64_t i = 0; i < width_; i += kLanes<T>) store<T>(vector + i, load(vector + i) + load(layer.bias + i));
      make_unit(vector, width_);
    }
  }

  // out = tanh(seen weight^T + bias) for the input of RCR, in the hidden layer.
  void see(const RegulatorLayer<T>& layer) {
    if (!options_.sees_query) {
      hidden_layer<Product>(workspace_ + layout_.aligned, layout_.width_stride, n_rows_, layer, chunk(),
                            workspace_ + layout_.hidden, layout_.hidden_stride);
      return;
    }
    for_each_slice([&](int64_t, int64_t row) {
      hidden_layer<Product>(query_, dim_, slice_rows_, layer, chunk(), at(layout_.hidden, row, layout_.hidden_stride),
                            layout_.hidden_stride);
    });
  }

  // Eq 8.
  void correspond(const CorrespondenceLayers<T>& layers) {
    const bool residual = options_.residual_correspondence;
    const T* hidden = workspace_ + layout_.hidden;
    T* temperatures = workspace_ + layout_.temperatures;
    see(layers.w3);
    for (int64_t row = 0; row < n_rows_; ++row) {
      T shift = dot(hidden + row * layout_.hidden_stride, layers.w4, layers.w3.outputs) + *layers.b4;
      if (residual) shift += changed_ ? temperatures[row] : temperature_;
      temperatures[row] = shift < T(0) ? T(0) : shift;
    }
    see(layers.w1);
    T* wide = workspace_ + layout_.wide;
    hidden_layer<Product>(hidden, layout_.hidden_stride, n_rows_, layers.w2, chunk(), wide, layout_.dim_stride);
    for (int64_t row = 0; row < n_rows_; ++row) {
      const T* change = at(layout_.wide, row, layout_.dim_stride);
      T* channels = at(layout_.channels, row, layout_.dim_stride);
      const T* before = changed_ ? channels : layers_.channels;
      for (int64_t d = 0; d < dim_; d += kLanes<T>) {
        Vector<T> value = load(change + d);
        if (residual && !changed_ && !options_.learned_factors) value += T(1);
        if (residual && changed_) value += load(channels + d);
        if (residual && !changed_ && options_.learned_factors) value += load_some(before + d, dim_ - d);
        value = value < splat(T(-1)) ? splat(T(-1)) : value;
        store<T>(channels + d, value > splat(T(1)) ? splat(T(1)) : value);
      }
    }
    changed_ = true;
  }

  ITM_FAST_INLINE static Vector<T> load_some(const T* source, int64_t count) {
    if (count >= kLanes<T>) return load(source);
    T values[kLanes<T>] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = source[i];
    return load(static_cast<const T*>(values));
  }

  // Eq 5.
  T mean_cosine(const Pair& pair) const {
    T total = T(0);
    for (int64_t j = 0; j < pair.n_rows; ++j) {
      const T* query = query_row(pair.row + j);
      const T* attended = at(layout_.wide, pair.row + j, layout_.dim_stride);
      const T norms = row_norm(query, dim_) * row_norm(attended, dim_), least = static_cast<T>(kNormEpsilon);
      total += dot(query, attended, dim_) / (norms < least ? least : norms);
    }
    return total / static_cast<T>(pair.n_rows);
  }

  void take_means() {
    for_each_pair([&](const Pair& pair) {
      mean_of_rows(static_cast<const T*>(at(layout_.aligned, pair.row, layout_.width_stride)), layout_.width_stride,
                   pair.n_rows, width_, pair.guidance);
    });
  }

  void aggregate(int64_t step) {
    const AggregationLayers<T>& layers = layers_.aggregations[step];
    const int64_t n_pairs = for_each_pair([](const Pair&) {});
    hidden_layer<Product>(workspace_ + layout_.guidance, layout_.width_stride, n_pairs, layers.a, chunk(),
                          workspace_ + layout_.guide, layout_.width_stride);
    hidden_layer<Product>(workspace_ + layout_.aligned, layout_.width_stride, n_rows_, layers.b, chunk(),
                          workspace_ + layout_.hidden, layout_.hidden_stride);
    for_each_pair([&](const Pair& pair) {
      const AggregatedPair<T> view{at(layout_.aligned, pair.row, layout_.width_stride),
                                   at(layout_.hidden, pair.row, layout_.hidden_stride),
                                   layout_.width_stride,
                                   layout_.hidden_stride,
                                   pair.n_rows,
                                   pair.guidance,
                                   pair.guide,
                                   pair.query_row,
                                   pair.context};
      aggregate_pair(view, layers, step, options_, workspace_ + layout_.logits, workspace_ + layout_.factors);
    });
  }

  const RegulatorProblem<T>& problem_;
  const RegulatorTile& tile_;
  const RegulatorOptions& options_;
  const RegulatorLayers<T>& layers_;
  const RegulatorLayout<Product> layout_;
  T* workspace_;
  const int64_t *first_set_, *last_set_;  // offsets of the first query set and past the last
  const int64_t slice_rows_, n_rows_;
  const T* query_;
  const int64_t dim_, width_;
  CrossAttentionOptions attention_;  // without the temperature, which differs by row
  T temperature_;                    // of the first attention
  bool changed_ = false;             // whether RCR has computed factors
  int64_t packed_ = -1;              // the packed context set
};

}  // namespace itm_fast::ITM_FAST_ISA
