// Backward of regulated_scores and cross_attention_alignments on the CPU, for the pairs with a gradient.
//
// Each thread differentiates a tile; then the threads share the sums over these tiles: gradients of weights, contexts
// and queries. Sums have the order of the tiles, so they do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/packed_regulators.h"
#include "ops/cross_attention.h"

namespace itm_fast {
namespace {

using torch::stable::Tensor;

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Rows of a tile. The forward takes 144; tiles of 96 rows save 6 MB with two threads and cost 3 % of the time over all
// pairs.
constexpr int64_t kTileRows = 96;

// Rows and columns of a gradient that one task adds to.
constexpr int64_t kTaskRows = 144, kTaskColumns = 256;

// Pairs cut into tiles of at most `max_rows` rows, unless one query set has more.
class PairTiles {
 public:
  PairTiles(int64_t max_rows, RegulatorSizes& sizes) : max_rows_(max_rows), sizes_(sizes) {}

  // Pairs are ordered by context set, then by query set.
  void add(int64_t query, int64_t context, int64_t n_rows) {
    if (rows_ > 0 && rows_ + n_rows > max_rows_) close();
    const bool extends = rows_ > 0 && slices_.back().context == context && slices_.back().last_query == query;
    if (extends) {
      ++slices_.back().last_query;
    } else {
      slices_.push_back({query, query + 1, context, rows_});
    }
    rows_ += n_rows;
    sizes_.rows = std::max(sizes_.rows, rows_);
    sizes_.query_rows = std::max(sizes_.query_rows, rows_ - slices_.back().row);
    ++n_pairs;
  }

  std::vector<RegulatorTile> tiles() {
    close();
    std::vector<RegulatorTile> tiles;
    int64_t first = 0;
    for (const auto& [last, rows] : ends_) {
      tiles.push_back({slices_.data() + first, slices_.data() + last, rows});
      first = last;
    }
    return tiles;
  }

  int64_t n_pairs = 0;

 private:
  void close() {
    if (rows_ > 0) ends_.emplace_back(static_cast<int64_t>(slices_.size()), rows_);
    rows_ = 0;
  }

  int64_t max_rows_, rows_ = 0;
  RegulatorSizes& sizes_;
  std::vector<RegulatorSlice> slices_;
  std::vector<std::pair<int64_t, int64_t>> ends_;  // of each tile: past its last slice, and its rows
};

// Rows that are exactly zero have no direction and receive no gradient.
template <typename T>
void clear_zero_rows(const FragmentsView<T>& rows, T* gradient) {
  torch::stable::parallel_for(0, rows.offsets[rows.n_sets], 64, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* values = rows.values + row * rows.dim;
      if (std::any_of(values, values + rows.dim, [](T value) { return value != T(0); })) continue;
      std::fill(gradient + row * rows.dim, gradient + (row + 1) * rows.dim, T(0));
    }
  });
}

// A slice, and the tile of the current ones that holds it.
struct PlacedSlice {
  const RegulatorSlice* slice;
  int64_t tile;
};

// Adds the parts of the tiles from `first` on, one per workspace, to all gradients.
template <typename T>
void add_tiles(const RegulatorProblem<T>& problem, const RegulatorBackwardKernels<T>& kernels,
               const RegulatorTile* first, const std::vector<Buffer<T>>& workspaces, int64_t n_tiles,
               const std::vector<WeightProduct<T>>& products, T* query_gradient, T* context_gradient) {
  std::vector<std::function<void(T*)>> tasks;
  for (const WeightProduct<T>& product : products) {
    for (int64_t row = 0; row < product.outputs; row += kTaskRows) {
      tasks.push_back([&, row](T* scratch) {
        const int64_t last = std::min(row + kTaskRows, product.outputs);
        for (int64_t i = 0; i < n_tiles; ++i) {
          kernels.add_weight_gradient(problem, first[i], product, row, last, kTaskRows, workspaces[i].data(), scratch);
        }
      });
    }
  }
  std::vector<PlacedSlice> slices;
  for (int64_t i = 0; i < n_tiles; ++i) {
    for (const RegulatorSlice* slice = first[i].first; slice < first[i].last; ++slice) slices.push_back({slice, i});
  }
  // Slices of one context set are adjacent.
  for (size_t begin = 0, end = 0; begin < slices.size(); begin = end) {
    while (end < slices.size() && slices[end].slice->context == slices[begin].slice->context) ++end;
    tasks.push_back([&, begin, end](T* scratch) {
      T* rows = context_gradient + problem.contexts.offsets[slices[begin].slice->context] * problem.contexts.dim;
      for (size_t i = begin; i < end; ++i) {
        kernels.add_context_gradient(problem, *slices[i].slice, workspaces[slices[i].tile].data(), scratch, rows);
      }
    });
  }
  for (int64_t column = 0; column < problem.queries.dim; column += kTaskColumns) {
    tasks.push_back([&, column](T*) {
      const int64_t last = std::min(column + kTaskColumns, problem.queries.dim);
      for (int64_t i = 0; i < n_tiles; ++i) {
        kernels.add_query_gradient(problem, first[i], column, last, workspaces[i].data(), query_gradient);
      }
    });
  }
  share_tasks<Buffer<T>>(
      static_cast<int64_t>(tasks.size()),
      [&] { return Buffer<T>(kernels.products_workspace(std::max(kTaskRows, problem.sizes.contexts))); },
      [&](int64_t task, Buffer<T>& scratch) { tasks[task](scratch.data()); });
}

// `has_gradient` says of a pair of sets whether it counts; differentiate(problem, tile, workspace) runs a tile.
template <typename T, typename HasGradient, typename Differentiate>
Gradients differentiate_pairs(const Tensor& queries, const Operand<T>& query, const Tensor& contexts,
                              const Operand<T>& context, const std::vector<Tensor>& tensors,
                              const RegulatorWeights& weights, const RegulatorOptions& options,
                              const HasGradient& has_gradient, const Differentiate& differentiate) {
  const RegulatorKernels<T>& forward = exact_kernels(T{});
  const RegulatorBackwardKernels<T>& kernels = backward_kernels(T{});
  const PackedRegulators<T> packed(weights, options, forward, &kernels);
  RegulatorProblem<T> problem{query.view, context.view, options, packed.layers,
                              regulator_sizes(query, context, weights, options)};
  PairTiles pairs(kTileRows, problem.sizes);
  for (int64_t c = 0; c < context.view.n_sets; ++c) {
    for (int64_t q = 0; q < query.view.n_sets; ++q) {
      if (query.view.length(q) > 0 && has_gradient(q, c)) pairs.add(q, c, query.view.length(q));
    }
  }
  const std::vector<RegulatorTile> tiles = pairs.tiles();

  int64_t n_weights = 0;
  for (const Tensor& tensor : tensors) n_weights += tensor.numel();
  Tensor query_gradient = torch::stable::new_zeros(queries, {queries.size(0), queries.size(1)}, kScalarType<T>);
  Tensor context_gradient = torch::stable::new_zeros(contexts, {contexts.size(0), contexts.size(1)}, kScalarType<T>);
  Tensor weight_gradient = torch::stable::new_zeros(queries, {n_weights}, kScalarType<T>);
  auto* of_queries = static_cast<T*>(query_gradient.mutable_data_ptr());
  auto* of_contexts = static_cast<T*>(context_gradient.mutable_data_ptr());
  std::vector<WeightProduct<T>> products(tensors.size());
  products.resize(
      kernels.list_weight_products(problem, static_cast<T*>(weight_gradient.mutable_data_ptr()), products.data()));

  const int64_t n_tiles = static_cast<int64_t>(tiles.size());
  const int64_t n_workspaces = std::min<int64_t>(n_tiles, torch::stable::get_num_threads());
  std::vector<Buffer<T>> workspaces;
  for (int64_t i = 0; i < n_workspaces; ++i) workspaces.emplace_back(kernels.workspace(problem.sizes, options));
  for (int64_t first = 0; first < n_tiles; first += n_workspaces) {
    const int64_t count = std::min(n_workspaces, n_tiles - first);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        differentiate(kernels, problem, tiles[first + i], workspaces[i].data());
      }
    });
    add_tiles(problem, kernels, tiles.data() + first, workspaces, count, products, of_queries, of_contexts);
  }
  clear_zero_rows(query.view, of_queries);
  clear_zero_rows(context.view, of_contexts);
  Tensor n_pairs = torch::stable::new_empty(queries, {1}, torch::headeronly::ScalarType::Long);
  *static_cast<int64_t*>(n_pairs.mutable_data_ptr()) = pairs.n_pairs;
  return {query_gradient, context_gradient, weight_gradient, n_pairs};
}

template <typename T>
Gradients scores_backward(const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets,
                          const Tensor& contexts, const Tensor& context_offsets, const std::vector<Tensor>& tensors,
                          const RegulatorWeights& weights, const RegulatorOptions& options) {
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  const Tensor gradient = torch::stable::contiguous(torch::stable::to(grad_scores, kScalarType<T>));
  const auto* gradients = static_cast<const T*>(gradient.const_data_ptr());
  return differentiate_pairs<T>(
      queries, query, contexts, context, tensors, weights, options,
      [&](int64_t q, int64_t c) {
        return context.view.length(c) > 0 && gradients[q * context.view.n_sets + c] != T(0);
      },
      [&](const RegulatorBackwardKernels<T>& kernels, const RegulatorProblem<T>& problem, const RegulatorTile& tile,
          T* workspace) { kernels.differentiate_scores(problem, tile, workspace, gradients); });
}

template <typename T>
Gradients alignments_backward(const Tensor& grad_alignments, const Tensor& queries, const Tensor& query_offsets,
                              const Tensor& contexts, const Tensor& context_offsets, const std::vector<Tensor>& tensors,
                              const RegulatorWeights& weights, const RegulatorOptions& options) {
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  const Tensor gradient = torch::stable::contiguous(torch::stable::to(grad_alignments, kScalarType<T>));
  const auto* gradients = static_cast<const T*>(gradient.const_data_ptr());
  const int64_t n_rows = queries.size(0), width = weights.width;
  return differentiate_pairs<T>(
      queries, query, contexts, context, tensors, weights, options,
      [&](int64_t q, int64_t c) {
        const T* first = gradients + (c * n_rows + query.view.offsets[q]) * width;
        return std::any_of(first, first + query.view.length(q) * width, [](T value) { return value != T(0); });
      },
      [&](const RegulatorBackwardKernels<T>& kernels, const RegulatorProblem<T>& problem, const RegulatorTile& tile,
          T* workspace) { kernels.differentiate_alignments(problem, tile, n_rows, workspace, gradients); });
}

Gradients regulated_scores_backward(const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets,
                                    const Tensor& contexts, const Tensor& context_offsets, std::vector<Tensor> weights,
                                    int64_t alignments, int64_t correspondences, int64_t aggregations, bool scored,
                                    bool learned_factors, const std::string& activation, bool normalize_mean,
                                    bool normalize_attended, bool normalize_guidance, const std::string& schedule,
                                    bool residual_correspondence, bool residual_aggregation,
                                    const std::string& correspondence_input, double temperature, double negative_slope,
                                    const std::string& focal, double dropout, std::optional<Tensor> seed,
                                    const std::string& precision, int64_t /*longest_query*/,
                                    int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_score_gradient(grad_scores, query_offsets, context_offsets);
  RegulatorOptions options =
      regulator_options({alignments, correspondences, aggregations, scored, learned_factors, activation, normalize_mean,
                         normalize_attended, normalize_guidance, schedule, residual_correspondence,
                         residual_aggregation, correspondence_input},
                        cross_attention_options(temperature, "clipped_l2norm", negative_slope, focal, "mean", 1.0));
  options.dropout = counter_dropout(dropout, seed, queries);
  if (dropout > 0.0) options.dropout.set_key(*static_cast<const int64_t*>(seed->const_data_ptr()));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  const bool wide = queries.scalar_type() == torch::headeronly::ScalarType::Double;
  return (wide ? scores_backward<double> : scores_backward<float>)(grad_scores, queries, query_offsets, contexts,
                                                                   context_offsets, weights, checked, options);
}

Gradients cross_attention_alignments_backward(const Tensor& grad_alignments, const Tensor& queries,
                                              const Tensor& query_offsets, const Tensor& contexts,
                                              const Tensor& context_offsets, std::vector<Tensor> weights,
                                              int64_t correspondences, bool residual_correspondence, double temperature,
                                              const std::string& normalization, double negative_slope,
                                              const std::string& focal, const std::string& precision,
                                              int64_t /*longest_query*/, int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const RegulatorOptions options =
      alignment_options(correspondences, residual_correspondence,
                        cross_attention_options(temperature, normalization, negative_slope, focal, "mean", 1.0));
  const RegulatorWeights checked = regulator_weights(weights, options, queries);
  check_alignment_gradient(grad_alignments, queries, context_offsets, checked);
  const bool wide = queries.scalar_type() == torch::headeronly::ScalarType::Double;
  return (wide ? alignments_backward<double> : alignments_backward<float>)(grad_alignments, queries, query_offsets,
                                                                           contexts, context_offsets, weights, checked,
                                                                           options);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("regulated_scores_backward", TORCH_BOX(&itm_fast::regulated_scores_backward));
  m.impl("cross_attention_alignments_backward", TORCH_BOX(&itm_fast::cross_attention_alignments_backward));
}
