// Backward of regulated cross-attention on the CPU, tile by tile.
//
// `RegulationBackward` runs the forward of a tile again, keeps every step, and goes through the steps in reverse. It
// leaves the factors of the remaining products in the workspace: weight gradients are products of the gradients and
// inputs of a layer (`list_weight_products`), context gradients are products of attention and attended gradients
// (`add_context_gradient`). These sums run over tiles in order, so results do not depend on the number of threads.
#pragma once

#include "itm_fast/cpu/regulator_aggregation_backward.h"
#include "itm_fast/cpu/regulator_attention_backward.h"
#include "itm_fast/cpu/regulators.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename Product>
struct RegulatorBackwardLayout : RegulatorLayout<Product> {
  // Gradients of the layers' sums, by step.
  StepArrays aligned_gradients, hidden_gradients, narrow_gradients, shift_gradients, v_gradients;
  // Gradients of the current step, of rows or pairs.
  int64_t channels_gradient, temperature_gradient, aligned_gradient, guidance_gradient, score_gradient;
  int64_t query_gradient, product, score_gradients, normalized_gradient;

  RegulatorBackwardLayout(const RegulatorSizes& sizes, const RegulatorOptions& options)
      : RegulatorLayout<Product>(sizes, options, true) {
    const int64_t rows = sizes.rows + Product::kBlockRows, narrow = rows * this->width_stride;
    aligned_gradients = this->take_steps(options.n_alignments, narrow);
    hidden_gradients = this->take_steps(options.n_correspondences, rows * this->hidden_stride);
    narrow_gradients = this->take_steps(options.n_correspondences, rows * this->hidden_stride);
    shift_gradients = this->take_steps(options.n_correspondences, rows);
    v_gradients = this->take_steps(options.n_aggregations, narrow);
    channels_gradient = this->take(rows * this->dim_stride);
    temperature_gradient = this->take(rows);
    aligned_gradient = this->take(narrow);
    guidance_gradient = this->take(narrow);
    score_gradient = this->take(rows);
    query_gradient = this->take(rows * this->dim_stride);
    product = this->take(rows * larger(larger(this->dim_stride, this->hidden_stride), this->context_stride));
    score_gradients = this->take(sizes.contexts * this->query_stride);
    normalized_gradient = this->take(sizes.contexts * this->query_stride);
  }
};

template <typename Product>
class RegulationBackward : public Regulation<Product> {
  using Base = Regulation<Product>;
  using Base::at, Base::wide, Base::chunk, Base::for_each_row, Base::for_each_pair, Base::for_each_slice;
  using Base::problem_, Base::options_, Base::layers_, Base::workspace_, Base::n_rows_, Base::n_steps_, Base::dim_,
      Base::width_;
  using typename Base::Pair;
  using typename Base::T;

 public:
  RegulationBackward(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace)
      : Base(problem, tile, workspace, true), places_(problem.sizes, problem.options) {}

  // `gradients` are those of the scores, (query sets, context sets).
  void score(const T* gradients) {
    Base::run_steps();
    clear();
    if (!options_.scored) {
      for_each_pair([&](const Pair& pair) { mean_cosine_backward(pair, gradient_of(gradients, pair)); });
      attend_backward(n_steps_);
    } else {
      for_each_pair([&](const Pair& pair) { score_backward(pair, gradient_of(gradients, pair)); });
      if (!options_.interleaved) {
        for (int64_t step = options_.n_aggregations; step-- > 0;) aggregate_backward(step, n_steps_ - 1);
        means_backward();
      }
    }
    run_steps_backward();
  }

  // `gradients` are those of the last alignments, (context sets, query rows, width).
  void align(int64_t n_query_rows, const T* gradients) {
    for (int64_t step = 0; step < n_steps_; ++step) Base::regulate_attention(step);
    clear();
    for_each_slice([&](const RegulatorSlice& slice) {
      for (int64_t j = 0; j < Base::slice_rows(slice); ++j) {
        const T* source = gradients + (slice.context * n_query_rows + Base::first_row(slice) + j) * width_;
        __builtin_memcpy(at(places_.aligned_gradient, slice.row + j), source, width_ * sizeof(T));
      }
    });
    run_steps_backward();
  }

 private:
  T gradient_of(const T* gradients, const Pair& pair) const {
    return gradients[pair.query * problem_.contexts.n_sets + pair.context];
  }

  void clear() {
    const auto zero = [&](int64_t array, int64_t count) { __builtin_memset(workspace_ + array, 0, count * sizeof(T)); };
    zero(places_.query_gradient, n_rows_ * places_.dim_stride);
    zero(places_.channels_gradient, n_rows_ * places_.dim_stride);
    zero(places_.temperature_gradient, n_rows_);
    zero(places_.aligned_gradient, n_rows_ * places_.width_stride);
    zero(places_.guidance_gradient, n_rows_ * places_.width_stride);
  }

  void run_steps_backward() {
    for (int64_t step = n_steps_; step-- > 0;) {
      if (options_.interleaved) {
        aggregate_backward(step, step);
        if (step == 0) means_backward();
      }
      if (step < options_.n_correspondences) correspond_backward(step);
      if (step < options_.n_alignments) {
        align_backward(step);
        attend_backward(step);
      }
    }
  }

  void mean_cosine_backward(const Pair& pair, T gradient) {
    const T share = gradient / static_cast<T>(pair.n_rows), least = static_cast<T>(kNormEpsilon);
    for (int64_t j = 0; j < pair.n_rows; ++j) {
      const T* query = problem_.queries.values + (pair.query_row + j) * dim_;
      T* attended = wide(places_.attended[n_steps_], pair.row + j);
      T* out = wide(places_.query_gradient, pair.row + j);
      const T query_norm = row_norm(query, dim_), norm = row_norm(attended, dim_), product = query_norm * norm;
      const T direct = share / (product < least ? least : product);
      const T along = product < least ? T(0) : -direct * (dot<T>(query, attended, dim_) / product);
      const T of_query = product < least ? T(0) : along * norm / query_norm;
      const T of_attended = product < least ? T(0) : along * query_norm / norm;
      for (int64_t d = 0; d < dim_; ++d) {
        const T value = attended[d];
        out[d] += direct * value + of_query * query[d];
        attended[d] = direct * query[d] + of_attended * value;
      }
    }
  }

  void score_backward(const Pair& pair, T gradient) {
    const T* guidance = at(places_.guidance[options_.n_aggregations], pair.index);
    T* scored = at(places_.scored, pair.index);
    T* out = at(places_.guidance_gradient, pair.index);
    const T score = score_of_guidance(guidance, width_, layers_, options_, scored);
    const T slope = options_.activation == Activation::tanh ? T(1) - score * score : score * (T(1) - score);
    const T of_sum = workspace_[places_.score_gradient + pair.index] = gradient * slope;
    for (int64_t i = 0; i < width_; ++i) out[i] = of_sum * layers_.u[i];
    if (options_.normalize_mean) unit_backward(guidance, row_norm(guidance, width_), width_, out, out);
  }

  void means_backward() {
    for_each_pair([&](const Pair& pair) {
      const T* gradient = at(places_.guidance_gradient, pair.index);
      for (int64_t j = 0; j < pair.n_rows; ++j) {
        T* out = at(places_.aligned_gradient, pair.row + j);
        for (int64_t i = 0; i < width_; ++i) out[i] += gradient[i] / static_cast<T>(pair.n_rows);
      }
    });
  }

  // sums (rows, stride) += gradients (rows, outputs) times the layer's weight.
  void add_input_gradient(const T* gradients, int64_t stride, int64_t n_rows, const RegulatorLayer<T>& layer, T* sums,
                          int64_t sums_stride) {
    T* product = workspace_ + places_.product;
    const int64_t product_stride = round_up(layer.inputs, kPanelColumns<T>);
    multiply_packed<Product>(gradients, stride, n_rows, layer.outputs, layer.transposed, layer.inputs, chunk(), product,
                             product_stride);
    for (int64_t row = 0; row < n_rows; ++row) {
      add_row(product + row * product_stride, layer.inputs, sums + row * sums_stride);
    }
  }

  void aggregate_backward(int64_t step, int64_t aligned_step) {
    const AggregationLayers<T>& layers = layers_.aggregations[step];
    const int64_t n_pairs = for_each_pair([&](const Pair& pair) {
      const AggregationGradient<T> gradient{at(places_.guidance_gradient, pair.index),
                                            at(places_.aligned_gradient, pair.row),
                                            at(places_.local[step], pair.row, places_.hidden_stride),
                                            at(places_.guide[step], pair.index),
                                            at(places_.v_gradients[step], pair.index),
                                            workspace_ + places_.logits[step] + pair.row};
      aggregate_pair_backward(Base::aggregated_pair(pair, step, aligned_step), layers, step, options_,
                              workspace_ + places_.weighted, workspace_ + places_.factors, workspace_ + places_.product,
                              gradient);
    });
    add_input_gradient(workspace_ + places_.guide[step], places_.width_stride, n_pairs, layers.a,
                       workspace_ + places_.guidance_gradient, places_.width_stride);
    add_input_gradient(workspace_ + places_.local[step], places_.hidden_stride, n_rows_, layers.b,
                       workspace_ + places_.aligned_gradient, places_.width_stride);
  }

  void correspond_backward(int64_t step) {
    const CorrespondenceLayers<T>& layers = layers_.correspondences[step];
    const int64_t stride = places_.hidden_stride;
    for (int64_t row = 0; row < n_rows_; ++row) {
      T& temperature_gradient = workspace_[places_.temperature_gradient + row];
      const T after = workspace_[places_.temperatures[step + 1] + row];
      const T shift = after == T(0) ? T(0) : temperature_gradient;
      workspace_[places_.shift_gradients[step] + row] = shift;
      if (!options_.residual_correspondence || after == T(0)) temperature_gradient = T(0);
      const T* narrow = at(places_.narrow[step], row, stride);
      T* narrow_gradient = at(places_.narrow_gradients[step], row, stride);
      for (int64_t i = 0; i < layers.w3.outputs; ++i) {
        narrow_gradient[i] = shift * layers.w4[i] * (T(1) - narrow[i] * narrow[i]);
      }
      const T* factors = Base::channels_of(step, row);
      T *change = wide(places_.changes[step], row), *gradient = wide(places_.channels_gradient, row);
      for (int64_t d = 0; d < dim_; d += kLanes<T>) {
        const Vector<T> value = Base::changed_channels(step, change, factors, d), before = load(change + d);
        // Within the bounds; NaN is not.
        const Mask<T> passes = (value >= splat(T(-1))) & (value <= splat(T(1)));
        const Vector<T> passed = select<T>(passes, load(gradient + d), Vector<T>{});
        store<T>(change + d, passed * (T(1) - before * before));
        store<T>(gradient + d, options_.residual_correspondence ? passed : Vector<T>{});
      }
    }
    T* hidden_gradients = workspace_ + places_.hidden_gradients[step];
    multiply_packed<Product>(workspace_ + places_.changes[step], places_.dim_stride, n_rows_, dim_,
                             layers.w2.transposed, layers.w2.inputs, chunk(), hidden_gradients, stride);
    for (int64_t row = 0; row < n_rows_; ++row) {
      const T* hidden = at(places_.hidden[step], row, stride);
      tanh_backward(hidden, layers.w1.outputs, hidden_gradients + row * stride);
    }
    T* seen = workspace_ + (options_.sees_query ? places_.query_gradient : places_.aligned_gradient);
    const int64_t seen_stride = options_.sees_query ? places_.dim_stride : places_.width_stride;
    add_input_gradient(hidden_gradients, stride, n_rows_, layers.w1, seen, seen_stride);
    add_input_gradient(workspace_ + places_.narrow_gradients[step], stride, n_rows_, layers.w3, seen, seen_stride);
  }

  // The attended vectors become their gradients.
  void align_backward(int64_t step) {
    const RegulatorLayer<T>& layer = layers_.alignments[step];
    T* gradients = workspace_ + places_.aligned_gradients[step];
    for (int64_t row = 0; row < n_rows_; ++row) {
      T* incoming = at(places_.aligned_gradient, row);
      scaled_unit_backward(at(places_.aligned[step], row), workspace_[places_.aligned_norms[step] + row], width_,
                           incoming, gradients + row * places_.width_stride);
      __builtin_memset(incoming, 0, width_ * sizeof(T));
    }
    T* square_gradients = workspace_ + places_.product;
    multiply_packed<Product>(gradients, places_.width_stride, n_rows_, width_, layer.transposed, dim_, chunk(),
                             square_gradients, places_.dim_stride);
    for_each_row([&](int64_t row, const T* query) {
      T *attended = wide(places_.attended[step], row), *out = wide(places_.query_gradient, row);
      T* gradient = wide(places_.product, row);
      const T norm = row_norm(attended, dim_), scale = Base::attended_scale(norm);
      for (int64_t d = 0; d < dim_; ++d) {
        const T of_difference = 2 * gradient[d] * (query[d] - attended[d] * scale);
        out[d] += of_difference;
        gradient[d] = -of_difference;
      }
      if (options_.normalize_attended) {
        unit_backward(attended, norm, dim_, gradient, attended);
      } else {
        __builtin_memcpy(attended, gradient, dim_ * sizeof(T));
      }
    });
  }

  // From the gradients of the attended vectors. The raw scores become their gradients, and channel factors the
  // reweighted queries.
  void attend_backward(int64_t step) {
    for_each_slice([&](const RegulatorSlice& slice) {
      const int64_t n_rows = Base::slice_rows(slice), n_contexts = problem_.contexts.length(slice.context);
      const int64_t* sets = problem_.queries.offsets;
      T* raw = at(places_.raw[step], slice.row, places_.context_stride);
      T* product = workspace_ + places_.product;
      if (n_contexts == 0) return;
      Base::pack(slice.context);
      attend_slice_backward<Product>(wide(places_.attended[step], slice.row), sets + slice.first_query,
                                     sets + slice.last_query, n_contexts, dim_, Base::temperatures_of(step, slice.row),
                                     Base::attention_, places_, workspace_,
                                     at(places_.attention[step], slice.row, places_.context_stride), raw,
                                     workspace_ + places_.temperature_gradient + slice.row);
      multiply_packed<Product>(raw, places_.context_stride, n_rows, n_contexts, workspace_ + places_.context_rows, dim_,
                               chunk(), product, places_.dim_stride);
      const T* queries = Base::slice_queries(slice);
      for (int64_t j = 0; j < n_rows; ++j) {
        const T *gradient = product + j * places_.dim_stride, *query = queries + j * dim_;
        T* out = wide(places_.query_gradient, slice.row + j);
        if (!Base::has_channels(step)) {
          add_row(gradient, dim_, out);
          continue;
        }
        const T* factors = Base::channels_of(step, slice.row + j);
        T* channels_gradient = wide(places_.channels_gradient, slice.row + j);
        T* reweighted = wide(places_.channels[step], slice.row + j);
        for (int64_t d = 0; d < dim_; ++d) {
          out[d] += gradient[d] * factors[d];
          channels_gradient[d] += gradient[d] * query[d];
        }
        multiply_rows(query, factors, dim_, reweighted);
      }
    });
  }

  const RegulatorBackwardLayout<Product> places_;
};

// Lists the products that give the gradients of all weights, in the order of the weights; `gradients` holds them one
// after the other. Returns the number of products.
template <typename Product>
inline int64_t list_weight_products(const RegulatorProblem<typename Product::Value>& problem,
                                    typename Product::Value* gradients,
                                    WeightProduct<typename Product::Value>* products) {
  using T = typename Product::Value;
  const RegulatorOptions& options = problem.options;
  const RegulatorLayers<T>& layers = problem.layers;
  const RegulatorBackwardLayout<Product> places(problem.sizes, options);
  const int64_t width = problem.sizes.width, dim = problem.queries.dim;
  int64_t count = 0;
  const auto take = [&gradients](int64_t size) {
    T* begin = gradients;
    gradients += size;
    return begin;
  };
  const auto list = [&](int64_t gradient, int64_t stride, int64_t outputs, int64_t input, int64_t input_stride,
                        int64_t inputs, bool of_pairs, bool of_query = false) {
    T* weight = take(outputs * inputs);
    products[count++] = {gradient, stride,   outputs,  input,  input_stride,
                         inputs,   of_pairs, of_query, weight, take(outputs)};
  };
  const auto list_layer = [&](const RegulatorLayer<T>& layer, int64_t gradient, int64_t stride, int64_t input,
                              int64_t input_stride, bool of_pairs = false, bool of_query = false) {
    list(gradient, stride, layer.outputs, input, input_stride, layer.inputs, of_pairs, of_query);
  };
  // A gradient that is a sum over rows or pairs.
  const auto list_sum = [&](int64_t gradient, int64_t stride, int64_t outputs, bool of_pairs) {
    products[count++] = {gradient, stride, outputs, 0, 0, 0, of_pairs, false, nullptr, take(outputs)};
  };
  const int64_t w = places.width_stride, h = places.hidden_stride;
  for (int64_t i = 0; i < options.n_alignments; ++i) {
    list_layer(layers.alignments[i], places.aligned_gradients[i], w, places.squares[i], places.dim_stride);
  }
  for (int64_t i = 0; i < options.n_correspondences; ++i) {
    const CorrespondenceLayers<T>& step = layers.correspondences[i];
    const bool of_query = options.sees_query;
    list_layer(step.w1, places.hidden_gradients[i], h, places.aligned[i], w, false, of_query);
    list_layer(step.w2, places.changes[i], places.dim_stride, places.hidden[i], h);
    list_layer(step.w3, places.narrow_gradients[i], h, places.aligned[i], w, false, of_query);
    list(places.shift_gradients[i], 1, 1, places.narrow[i], h, step.w3.outputs, false);
  }
  for (int64_t i = 0; i < options.n_aggregations; ++i) {
    const int64_t aligned = options.interleaved ? i : options.n_alignments - 1;
    list_layer(layers.aggregations[i].a, places.guide[i], w, places.guidance[i], w, true);
    list_layer(layers.aggregations[i].b, places.local[i], h, places.aligned[aligned], w);
    list_sum(places.v_gradients[i], w, width, true);
    list_sum(places.logits[i], 1, 1, false);
  }
  if (options.scored) {
    const int64_t seen = options.normalize_mean ? places.scored : places.guidance[options.n_aggregations];
    list(places.score_gradient, 1, 1, seen, w, width, true);
  }
  if (options.learned_factors) {
    list_sum(places.channels_gradient, places.dim_stride, dim, false);
    list_sum(places.temperature_gradient, 1, 1, false);
  }
  return count;
}

// Adds a tile's part to the gradient of outputs [first, last) of one weight and its bias.
template <typename Product>
inline void add_weight_gradient(const RegulatorProblem<typename Product::Value>& problem, const RegulatorTile& tile,
                                const WeightProduct<typename Product::Value>& product, int64_t first, int64_t last,
                                int64_t max_rows, const typename Product::Value* workspace,
                                typename Product::Value* scratch) {
  using T = typename Product::Value;
  const auto add = [&](int64_t row, int64_t n_rows, const T* inputs, int64_t input_stride) {
    const T* gradient = workspace + product.gradient + row * product.gradient_stride;
    // Sum these rows first: adding each to the total would round by the total, once per row.
    __builtin_memset(scratch, 0, (last - first) * sizeof(T));
    for (int64_t r = 0; r < n_rows; ++r) {
      add_row(gradient + r * product.gradient_stride + first, last - first, scratch);
    }
    add_row(scratch, last - first, product.sum + first);
    if (product.weight == nullptr) return;
    add_rows_product<Product>(gradient + first, product.gradient_stride, true, last - first, n_rows, inputs,
                              input_stride, product.inputs, max_rows, scratch, product.weight + first * product.inputs);
  };
  if (!product.of_query) {
    int64_t n_rows = tile.n_rows;
    if (product.of_pairs) {
      n_rows = 0;
      for (const RegulatorSlice* slice = tile.first; slice < tile.last; ++slice) {
        n_rows += slice->last_query - slice->first_query;
      }
    }
    add(0, n_rows, workspace + product.input, product.input_stride);
    return;
  }
  for (const RegulatorSlice* slice = tile.first; slice < tile.last; ++slice) {
    const int64_t* offsets = problem.queries.offsets;
    add(slice->row, offsets[slice->last_query] - offsets[slice->first_query],
        problem.queries.set_values(slice->first_query), problem.queries.dim);
  }
}

// Adds one slice's part to the gradient of its context rows.
template <typename Product>
inline void add_context_gradient(const RegulatorProblem<typename Product::Value>& problem, const RegulatorSlice& slice,
                                 const typename Product::Value* workspace, typename Product::Value* scratch,
                                 typename Product::Value* gradient) {
  using T = typename Product::Value;
  const RegulatorOptions& options = problem.options;
  const RegulatorBackwardLayout<Product> places(problem.sizes, options);
  const int64_t dim = problem.queries.dim, n_contexts = problem.contexts.length(slice.context);
  const int64_t* offsets = problem.queries.offsets;
  const int64_t n_rows = offsets[slice.last_query] - offsets[slice.first_query];
  const int64_t n_steps = larger(options.n_alignments, options.n_correspondences);
  if (n_contexts == 0) return;
  const auto add = [&](int64_t factors, const T* rows, int64_t stride) {
    add_rows_product<Product>(workspace + factors + slice.row * places.context_stride, places.context_stride, true,
                              n_contexts, n_rows, rows, stride, dim, problem.sizes.contexts, scratch, gradient);
  };
  for (int64_t step = 0; step <= n_steps; ++step) {
    if (step < n_steps ? step >= options.n_alignments : !options.ends_in_cosines()) continue;
    const int64_t row = slice.row * places.dim_stride;
    add(places.attention[step], workspace + places.attended[step] + row, places.dim_stride);
    const bool reweighted = options.learned_factors || (step > 0 && options.n_correspondences > 0);
    if (reweighted) {
      add(places.raw[step], workspace + places.channels[step] + row, places.dim_stride);
    } else {
      add(places.raw[step], problem.queries.set_values(slice.first_query), dim);
    }
  }
}

// Adds columns [first, last) of a tile's part to the gradient of the query rows.
template <typename Product>
inline void add_query_gradient(const RegulatorProblem<typename Product::Value>& problem, const RegulatorTile& tile,
                               int64_t first, int64_t last, const typename Product::Value* workspace,
                               typename Product::Value* gradient) {
  const RegulatorBackwardLayout<Product> places(problem.sizes, problem.options);
  const int64_t* offsets = problem.queries.offsets;
  for (const RegulatorSlice* slice = tile.first; slice < tile.last; ++slice) {
    const int64_t begin = offsets[slice->first_query], n_rows = offsets[slice->last_query] - begin;
    for (int64_t j = 0; j < n_rows; ++j) {
      add_row(workspace + places.query_gradient + (slice->row + j) * places.dim_stride + first, last - first,
              gradient + (begin + j) * problem.queries.dim + first);
    }
  }
}

}  // namespace itm_fast::ITM_FAST_ISA
