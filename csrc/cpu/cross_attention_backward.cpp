// cross_attention_scores on the CPU: the backward, pair by pair if few pairs have a gradient, else in whole rows.
#include "cpu/cross_attention.h"

#include <torch/csrc/stable/library.h>

#include <numeric>
#include <tuple>

#include "cpu/huge_pages.h"
#include "cpu/kernels/lanes.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Score gradients kept at a time, in elements.
constexpr int64_t kScoreGradientElements = int64_t{1} << 22;
// If more than this share of the pairs has a gradient, computing all pairs is faster than selecting. Measured at 128 x
// 128 pairs of width 1024, with products in T and in bfloat16.
constexpr double kDenseShare = 0.65, kLowPrecisionDenseShare = 0.45;
// Gradient rows that a thread adds to at a time when threads share the products.
constexpr int64_t kProductRows = 144;

// The gradient of the rows of one side. If rows are stored in a narrower type than sums, a thread sums a few rows in
// scratch memory and rounds them once. All rows are kept in the wider type only if `in_steps` is set: a row is then
// added to several times.
template <typename S, typename T>
class RowGradient {
 public:
  RowGradient(const Tensor& values, bool wanted, bool in_steps)
      : wanted(wanted), dim_(values.size(1)), kernels_(kernels(S{})) {
    const int64_t n_rows = wanted ? values.size(0) : 0;
    result_ = torch::stable::new_empty(values, {n_rows, dim_}, kScalarType<S>);
    prefer_huge_pages(result_.mutable_data_ptr(), result_.numel() * static_cast<int64_t>(sizeof(S)));
    torch::stable::zero_(result_);
    out_ = static_cast<S*>(result_.mutable_data_ptr());
    if (std::is_same_v<S, T> || !in_steps) return;
    sums_ = Buffer<T>(n_rows * dim_);
    std::fill(sums_.data(), sums_.data() + n_rows * dim_, T(0));
  }

  // Allocates scratch memory for at most `max_rows` rows at a time.
  Buffer<T> scratch(int64_t max_rows) const {
    return Buffer<T>(std::is_same_v<S, T> || sums_.data() != nullptr ? 0 : max_rows * dim_);
  }

  // Calls add(rows) with the memory to which the gradient of rows [first, last) is added.
  template <typename Add>
  void add_to(int64_t first, int64_t last, Buffer<T>& scratch, Add add) {
    const int64_t begin = first * dim_, count = (last - first) * dim_;
    if constexpr (std::is_same_v<S, T>) {
      add(out_ + begin);
    } else if (sums_.data() != nullptr) {
      add(sums_.data() + begin);
    } else {
      std::fill(scratch.data(), scratch.data() + count, T(0));
      add(scratch.data());
      kernels_.narrow(scratch.data(), count, out_ + begin);
    }
  }

  Tensor finish() {
    if (sums_.data() != nullptr) kernels_.narrow(sums_.data(), result_.numel(), out_);
    return result_;
  }

  const bool wanted;

 private:
  int64_t dim_;
  const CrossAttentionKernels<S, T>& kernels_;
  Tensor result_;
  S* out_;
  Buffer<T> sums_;
};

// The pairs with a non-zero incoming gradient (NaN counts as non-zero), grouped by context.
template <typename T>
struct PairList {
  std::vector<RecomputedPair> pairs;
  std::vector<T> gradients;
  std::vector<int64_t> first;  // of each context set

  template <typename S>
  PairList(const T* gradient, const FragmentsView<S>& queries, const FragmentsView<S>& contexts)
      : first(contexts.n_sets + 1) {
    const auto counts = [&](int64_t q, int64_t c) {
      return gradient[q * contexts.n_sets + c] != T(0) && queries.length(q) > 0 && contexts.length(c) > 0;
    };
    for (int64_t q = 0; q < queries.n_sets; ++q) {
      for (int64_t c = 0; c < contexts.n_sets; ++c) first[c + 1] += counts(q, c);
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    pairs.resize(first.back());
    gradients.resize(first.back());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t q = 0; q < queries.n_sets; ++q) {
      for (int64_t c = 0; c < contexts.n_sets; ++c) {
        if (!counts(q, c)) continue;
        pairs[next[c]] = {q, c, 0, 0};
        gradients[next[c]++] = gradient[q * contexts.n_sets + c];
      }
    }
  }
};

template <typename S>
int64_t present_sets(const FragmentsView<S>& view) {
  int64_t count = 0;
  for (int64_t i = 0; i < view.n_sets; ++i) count += view.length(i) > 0;
  return count;
}

template <typename S>
bool all_finite(const FragmentsView<S>& view) {
  return kernels(S{}).all_finite(view.values, view.offsets[view.n_sets] * view.dim);
}

// Cuts the context sets into groups of at most kScoreGradientElements scores; set i has elements(i) of them.
template <typename Elements>
std::vector<int64_t> cut_into_groups(int64_t n_sets, Elements elements) {
  std::vector<int64_t> bounds{0};
  int64_t total = 0;
  for (int64_t set = 0; set < n_sets; ++set) {
    const int64_t more = elements(set);
    if (set > bounds.back() && total + more > kScoreGradientElements) {
      bounds.push_back(set);
      total = 0;
    }
    total += more;
  }
  if (n_sets > 0) bounds.push_back(n_sets);
  return bounds;
}

template <typename S, typename T>
struct Problem {
  const Operand<S>& query;
  const Operand<S>& context;
  const T* gradients;  // (query sets, context sets)
  const Grams<T>& grams;
  const CrossAttentionOptions& options;
};

template <typename S, typename T>
void add_pairs(const Problem<S, T>& problem, PairList<T>& list, const std::vector<int64_t>& groups,
               RowGradient<S, T>& query_gradient, RowGradient<S, T>& context_gradient) {
  const auto& table = kernels(S{});
  const FragmentsView<S>&query = problem.query.view, &context = problem.context.view;
  const int64_t max_queries = problem.query.max_length, max_contexts = problem.context.max_length;
  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    const int64_t first_pair = list.first[groups[g]], last_pair = list.first[groups[g + 1]];
    int64_t score_elements = 0, factor_elements = 0;
    for (int64_t i = first_pair; i < last_pair; ++i) {
      RecomputedPair& pair = list.pairs[i];
      pair.score_gradient = score_elements;
      pair.query_factor = factor_elements;
      score_elements += query.length(pair.query) * context.length(pair.context);
      factor_elements += query.length(pair.query);
    }
    Buffer<T> score_gradients(score_elements), query_factors(factor_elements);

    // Contexts with many pairs go first, so that no thread starts a long one at the end.
    std::vector<int64_t> order(groups[g + 1] - groups[g]);
    std::iota(order.begin(), order.end(), groups[g]);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return list.first[a + 1] - list.first[a] > list.first[b + 1] - list.first[b];
    });
    struct State {
      Buffer<T> workspace, rows;
    };
    share_tasks<State>(
        static_cast<int64_t>(order.size()),
        [&] {
          return State{Buffer<T>(table.pair_workspace(max_contexts, max_queries, context.dim)),
                       context_gradient.scratch(max_contexts)};
        },
        [&](int64_t task, State& state) {
          const int64_t set = order[task], n_pairs = list.first[set + 1] - list.first[set];
          if (n_pairs == 0) return;
          const auto differentiate = [&](T* gradient) {
            table.context_backward(query, context, set, problem.grams.values.data() + problem.grams.offsets[set],
                                   list.pairs.data() + list.first[set], list.gradients.data() + list.first[set],
                                   n_pairs, problem.options, max_contexts, max_queries, state.workspace.data(),
                                   score_gradients.data(), query_factors.data(), gradient);
          };
          if (context_gradient.wanted) {
            context_gradient.add_to(context.offsets[set], context.offsets[set + 1], state.rows, differentiate);
          } else {
            differentiate(nullptr);
          }
        });

    if (!query_gradient.wanted) continue;
    std::vector<std::vector<const RecomputedPair*>> by_query(query.n_sets);
    for (int64_t i = first_pair; i < last_pair; ++i) by_query[list.pairs[i].query].push_back(&list.pairs[i]);
    share_tasks<State>(
        query.n_sets,
        [&] {
          const int64_t converted = std::is_same_v<S, T> ? 0 : max_contexts * context.dim;
          return State{Buffer<T>(converted), query_gradient.scratch(max_queries)};
        },
        [&](int64_t set, State& state) {
          const auto& pairs = by_query[set];
          if (pairs.empty()) return;
          query_gradient.add_to(query.offsets[set], query.offsets[set + 1], state.rows, [&](T* gradient) {
            table.query_backward(query, context, set, pairs.data(), static_cast<int64_t>(pairs.size()),
                                 score_gradients.data(), query_factors.data(), state.workspace.data(), gradient);
          });
        });
  }
}

// Stride between rows of raw scores, in elements: kernels read and write whole panels.
template <typename S>
int64_t dense_stride(const FragmentsView<S>& queries) {
  return padded_to_lanes(queries.offsets[queries.n_sets]) + 4 * kMaxLanes;
}

template <typename S, typename T>
void add_all_pairs(const Problem<S, T>& problem, const ProductKernels<S, T>& products,
                   const std::vector<int64_t>& groups, RowGradient<S, T>& query_gradient,
                   RowGradient<S, T>& context_gradient) {
  const auto& table = kernels(S{});
  const FragmentsView<S>&query = problem.query.view, &context = problem.context.view;
  const std::vector<int64_t> columns = cut_into_runs(query, 0, query.n_sets, kTileColumns);
  const int64_t n_columns = static_cast<int64_t>(columns.size()) - 1, stride = dense_stride(query);
  const int64_t n_query_rows = query.offsets[query.n_sets];
  const int64_t max_rows = std::max(products.tile_rows, problem.context.max_length);
  const int64_t max_columns = std::max(kTileColumns, problem.query.max_length);

  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    const int64_t first_set = groups[g], last_set = groups[g + 1];
    const int64_t row_start = context.offsets[first_set], n_group_rows = context.offsets[last_set] - row_start;
    const std::vector<int64_t> runs = cut_into_runs(context, first_set, last_set, products.tile_rows);
    const int64_t n_runs = static_cast<int64_t>(runs.size()) - 1;
    Buffer<T> raw(n_group_rows * stride), factors((last_set - first_set) * stride);

    torch::stable::parallel_for(0, n_columns * n_runs, 1, [&](int64_t first, int64_t last) {
      Buffer<T> workspace(products.tile_workspace(max_rows, max_columns, query.dim));
      int64_t packed = -1;
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t column = tile / n_runs, run = tile % n_runs;
        if (column != packed) {
          products.pack_queries(query, columns[column], columns[column + 1], max_rows, max_columns, workspace.data());
          packed = column;
        }
        products.raw_tile(
            query, columns[column], columns[column + 1], context, runs[run], runs[run + 1], max_rows, max_columns,
            workspace.data(),
            raw.data() + (context.offsets[runs[run]] - row_start) * stride + query.offsets[columns[column]], stride);
      }
    });

    struct State {
      Buffer<T> workspace, converted, product, rows;
    };
    share_tasks<State>(
        n_runs,
        [&] {
          return State{Buffer<T>(table.block_workspace(problem.context.max_length, max_columns)),
                       Buffer<T>(std::is_same_v<S, T> ? 0 : problem.context.max_length * context.dim),
                       Buffer<T>(products.rows_workspace(max_rows)), context_gradient.scratch(max_rows)};
        },
        [&](int64_t run, State& state) {
          const int64_t run_start = context.offsets[runs[run]], run_end = context.offsets[runs[run + 1]];
          T* run_raw = raw.data() + (run_start - row_start) * stride;
          const auto differentiate = [&](T* gradient) {
            for (int64_t set = runs[run]; set < runs[run + 1]; ++set) {
              const int64_t row = context.offsets[set] - run_start;
              table.differentiate_context(
                  query, columns.data(), n_columns, context, set,
                  problem.grams.values.data() + problem.grams.offsets[set], problem.gradients + set, context.n_sets,
                  problem.options, problem.context.max_length, max_columns, state.converted.data(),
                  state.workspace.data(), run_raw + row * stride, stride, factors.data() + (set - first_set) * stride,
                  gradient == nullptr ? nullptr : gradient + row * context.dim);
            }
            if (gradient == nullptr) return;
            products.add_rows(run_raw, stride, false, run_end - run_start, n_query_rows, query.values, query.dim,
                              max_rows, state.product.data(), gradient);
          };
          if (context_gradient.wanted) {
            context_gradient.add_to(run_start, run_end, state.rows, differentiate);
          } else {
            differentiate(nullptr);
          }
        });

    if (!query_gradient.wanted) continue;
    share_tasks<State>(
        (n_query_rows + kProductRows - 1) / kProductRows,
        [&] {
          return State{{}, {}, Buffer<T>(products.rows_workspace(kProductRows)), query_gradient.scratch(kProductRows)};
        },
        [&](int64_t task, State& state) {
          const int64_t first = task * kProductRows, last = std::min(n_query_rows, first + kProductRows);
          query_gradient.add_to(first, last, state.rows, [&](T* gradient) {
            products.add_rows(raw.data() + first, stride, true, last - first, n_group_rows,
                              context.set_values(first_set), context.dim, kProductRows, state.product.data(), gradient);
            table.add_query_factors(query, first, last, factors.data(), last_set - first_set, stride, gradient);
          });
        });
  }
}

template <typename S, typename T>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_scores, const Tensor& queries,
                                            const Tensor& query_offsets, const Tensor& contexts,
                                            const Tensor& context_offsets, const CrossAttentionOptions& options,
                                            const std::string& precision, bool for_queries, bool for_contexts) {
  const Operand<S> query(queries, query_offsets), context(contexts, context_offsets);
  const Tensor gradient = torch::stable::contiguous(torch::stable::to(grad_scores, kScalarType<T>));
  const auto* gradients = static_cast<const T*>(gradient.data_ptr());
  const Grams<T> grams = gram_matrices<S, T>(context);
  const Problem<S, T> problem{query, context, gradients, grams, options};

  PairList<T> list(gradients, query.view, context.view);
  int64_t n_pairs = list.first.back();
  const int64_t n_all = present_sets(query.view) * present_sets(context.view);
  const ProductKernels<S, T>& products = product_kernels<S, T>(precision);
  const double share = &products == &kernels(S{}).products ? kDenseShare : kLowPrecisionDenseShare;
  const bool dense = static_cast<double>(n_pairs) > share * static_cast<double>(n_all) && all_finite(query.view) &&
                     all_finite(context.view);
  const std::vector<int64_t> groups = cut_into_groups(context.view.n_sets, [&](int64_t set) {
    if (dense) return context.view.length(set) * dense_stride(query.view);
    int64_t words = 0;
    for (int64_t i = list.first[set]; i < list.first[set + 1]; ++i) words += query.view.length(list.pairs[i].query);
    return words * context.view.length(set);
  });
  RowGradient<S, T> query_gradient(queries, for_queries, groups.size() > 2);
  RowGradient<S, T> context_gradient(contexts, for_contexts, false);
  if (dense) {
    n_pairs = n_all;
    add_all_pairs(problem, products, groups, query_gradient, context_gradient);
  } else {
    add_pairs(problem, list, groups, query_gradient, context_gradient);
  }
  Tensor count = torch::stable::new_empty(query_offsets, {1}, ScalarType::Long);
  *static_cast<int64_t*>(count.mutable_data_ptr()) = n_pairs;
  return {torch::stable::to(query_gradient.finish(), queries.scalar_type()),
          torch::stable::to(context_gradient.finish(), contexts.scalar_type()), count};
}

std::tuple<Tensor, Tensor, Tensor> cross_attention_scores_backward(
    const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
    const Tensor& context_offsets, double temperature, const std::string& normalization, double negative_slope,
    const std::string& focal, const std::string& aggregation, double logsumexp_temperature,
    const std::string& precision, bool for_queries, bool for_contexts, int64_t /*longest_query*/,
    int64_t /*longest_context*/) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_score_gradient(grad_scores, query_offsets, context_offsets);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_types(queries.scalar_type(), [&]<typename S, typename T>(S, T) {
    return backward<S, T>(grad_scores, queries, query_offsets, contexts, context_offsets, options, precision,
                          for_queries, for_contexts);
  });
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("cross_attention_scores_backward", TORCH_BOX(&itm_fast::cross_attention_scores_backward));
}
