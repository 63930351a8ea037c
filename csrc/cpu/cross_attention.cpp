// cross_attention_scores on the CPU: plans tiles and pair lists, and shares them among threads. What a thread computes
// depends on the shapes alone, never on the number of threads, so neither do the results.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpu/huge_pages.h"
#include "cpu/kernels/cross_attention.h"
#include "cpu/kernels/select.h"
#include "cpu/memory.h"
#include "ops/cross_attention.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tile's raw scores and attention stay in a core's second-level cache: 144 x 256 float32 are 147 kB each.
constexpr int64_t kTileRows = 144;
constexpr int64_t kTileColumns = 256;
// Score gradients that the backward keeps at a time, in elements.
constexpr int64_t kScoreGradientElements = int64_t{1} << 22;

const CrossAttentionKernels<float>& kernels(float) { ITM_FAST_RETURN_SELECTED(kCrossAttentionFloat32) }
const CrossAttentionKernels<double>& kernels(double) { ITM_FAST_RETURN_SELECTED(kCrossAttentionFloat64) }

template <typename T>
constexpr ScalarType kScalarType = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Double;

// Fragments in the kernels' dtype, with offsets that cannot lead outside the values whatever came in.
template <typename T>
class Operand {
 public:
  Operand(const Tensor& values, const Tensor& offsets)
      : values_(torch::stable::contiguous(torch::stable::to(values, kScalarType<T>))),
        offsets_(clamped_offsets(offsets, values.size(0))) {
    view.values = static_cast<const T*>(values_.data_ptr());
    view.offsets = offsets_.data();
    view.n_sets = static_cast<int64_t>(offsets_.size()) - 1;
    view.dim = values.size(1);
    for (int64_t i = 0; i < view.n_sets; ++i) max_length = std::max(max_length, view.length(i));
  }

  FragmentsView<T> view;
  int64_t max_length = 0;

 private:
  static std::vector<int64_t> clamped_offsets(const Tensor& offsets, int64_t n_rows) {
    const Tensor wide = torch::stable::contiguous(torch::stable::to(offsets, ScalarType::Long));
    const auto* source = static_cast<const int64_t*>(wide.data_ptr());
    std::vector<int64_t> result(source, source + wide.size(0));
    int64_t previous = 0;
    for (int64_t& offset : result) previous = offset = std::clamp(offset, previous, n_rows);
    return result;
  }

  Tensor values_;
  std::vector<int64_t> offsets_;
};

// Cuts the sets into runs of at most `max_rows` rows, or of one longer set; returns the first set of each run and the
// number of sets.
template <typename T>
std::vector<int64_t> cut_into_runs(const FragmentsView<T>& view, int64_t max_rows) {
  std::vector<int64_t> bounds{0};
  for (int64_t i = 0; i < view.n_sets; ++i) {
    if (i > bounds.back() && view.offsets[i + 1] - view.offsets[bounds.back()] > max_rows) bounds.push_back(i);
  }
  if (view.n_sets > 0) bounds.push_back(view.n_sets);
  return bounds;
}

// Runs body(task, thread_state) for all tasks; threads take the next task as they become free.
template <typename State>
void share_tasks(int64_t n_tasks, const std::function<State()>& make_state,
                 const std::function<void(int64_t, State&)>& body) {
  std::atomic<int64_t> next{0};
  const int64_t n_workers = std::min<int64_t>(n_tasks, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, n_workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      State state = make_state();
      for (int64_t task = next++; task < n_tasks; task = next++) body(task, state);
    }
  });
}

template <typename T>
struct Grams {
  Buffer<T> values;
  std::vector<int64_t> offsets;
};

template <typename T>
Grams<T> gram_matrices(const FragmentsView<T>& contexts) {
  const auto& table = kernels(T{});
  Grams<T> grams;
  grams.offsets.resize(contexts.n_sets + 1);
  for (int64_t i = 0; i < contexts.n_sets; ++i) {
    grams.offsets[i + 1] = grams.offsets[i] + table.gram_size(contexts.length(i));
  }
  grams.values = Buffer<T>(grams.offsets.back());
  torch::stable::parallel_for(0, contexts.n_sets, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) table.gram(contexts, i, grams.values.data() + grams.offsets[i]);
  });
  return grams;
}

template <typename T>
Tensor forward(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
               const Tensor& context_offsets, const CrossAttentionOptions& options) {
  const auto& table = kernels(T{});
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  Tensor scores = torch::stable::new_empty(queries, {query.view.n_sets, context.view.n_sets}, kScalarType<T>);
  const Grams<T> grams = gram_matrices(context.view);
  const std::vector<int64_t> columns = cut_into_runs(query.view, kTileColumns);
  const std::vector<int64_t> rows = cut_into_runs(context.view, kTileRows);
  const int64_t n_columns = static_cast<int64_t>(columns.size()) - 1, n_rows = static_cast<int64_t>(rows.size()) - 1;
  const int64_t max_rows = std::max(kTileRows, context.max_length);
  const int64_t max_columns = std::max(kTileColumns, query.max_length);
  auto* out = static_cast<T*>(scores.mutable_data_ptr());

  // A thread takes neighbouring tiles, so that it packs each run of queries once.
  torch::stable::parallel_for(0, n_columns * n_rows, 1, [&](int64_t first, int64_t last) {
    Buffer<T> workspace(table.tile_workspace(max_rows, max_columns, query.view.dim));
    int64_t packed = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t column = tile / n_rows, row = tile % n_rows;
      if (column != packed) {
        table.pack_queries(query.view, columns[column], columns[column + 1], max_rows, max_columns, workspace.data());
        packed = column;
      }
      table.score_tile(query.view, columns[column], columns[column + 1], context.view, rows[row], rows[row + 1],
                       grams.values.data(), grams.offsets.data(), options, max_rows, max_columns, workspace.data(),
                       out);
    }
  });
  return scores;
}

template <typename T>
Tensor zeros_like(const Tensor& values, bool wanted) {
  const int64_t n_rows = wanted ? values.size(0) : 0;
  Tensor zeros = torch::stable::new_empty(values, {n_rows, values.size(1)}, kScalarType<T>);
  prefer_huge_pages(zeros.mutable_data_ptr(), zeros.numel() * static_cast<int64_t>(sizeof(T)));
  return torch::stable::zero_(zeros);
}

// The pairs whose incoming gradient is not zero (NaN counts as not zero), context by context.
template <typename T>
struct PairList {
  std::vector<RecomputedPair> pairs;
  std::vector<T> gradients;
  std::vector<int64_t> first;  // of each context set

  PairList(const T* gradient, const FragmentsView<T>& queries, const FragmentsView<T>& contexts)
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

template <typename T>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_scores, const Tensor& queries,
                                            const Tensor& query_offsets, const Tensor& contexts,
                                            const Tensor& context_offsets, const CrossAttentionOptions& options,
                                            bool for_queries, bool for_contexts) {
  const auto& table = kernels(T{});
  const Operand<T> query(queries, query_offsets), context(contexts, context_offsets);
  const Tensor gradient = torch::stable::contiguous(torch::stable::to(grad_scores, kScalarType<T>));
  Tensor query_gradient = zeros_like<T>(queries, for_queries), context_gradient = zeros_like<T>(contexts, for_contexts);
  auto* query_out = static_cast<T*>(query_gradient.mutable_data_ptr());
  auto* context_out = static_cast<T*>(context_gradient.mutable_data_ptr());
  const int64_t dim = query.view.dim;

  PairList<T> list(static_cast<const T*>(gradient.data_ptr()), query.view, context.view);
  Tensor count = torch::stable::new_empty(query_offsets, {1}, ScalarType::Long);
  *static_cast<int64_t*>(count.mutable_data_ptr()) = list.first.back();
  const Grams<T> grams = gram_matrices(context.view);

  for (int64_t group = 0; group < context.view.n_sets;) {
    // As many contexts as fit the bound, at least one.
    int64_t group_end = group, score_elements = 0, factor_elements = 0;
    while (group_end < context.view.n_sets) {
      int64_t words = 0;
      for (int64_t i = list.first[group_end]; i < list.first[group_end + 1]; ++i) {
        words += query.view.length(list.pairs[i].query);
      }
      const int64_t elements = words * context.view.length(group_end);
      if (group_end > group && score_elements + elements > kScoreGradientElements) break;
      for (int64_t i = list.first[group_end]; i < list.first[group_end + 1]; ++i) {
        list.pairs[i].score_gradient = score_elements;
        list.pairs[i].query_factor = factor_elements;
        score_elements += query.view.length(list.pairs[i].query) * context.view.length(group_end);
        factor_elements += query.view.length(list.pairs[i].query);
      }
      ++group_end;
    }
    Buffer<T> score_gradients(score_elements), query_factors(factor_elements);

    // Contexts with many pairs go first, so that no thread is left with a long one at the end.
    std::vector<int64_t> order(group_end - group);
    std::iota(order.begin(), order.end(), group);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return list.first[a + 1] - list.first[a] > list.first[b + 1] - list.first[b];
    });
    share_tasks<Buffer<T>>(
        static_cast<int64_t>(order.size()),
        [&] { return Buffer<T>(table.pair_workspace(context.max_length, query.max_length)); },
        [&](int64_t task, Buffer<T>& workspace) {
          const int64_t set = order[task], n_pairs = list.first[set + 1] - list.first[set];
          if (n_pairs == 0) return;
          table.context_backward(query.view, context.view, set, grams.values.data() + grams.offsets[set],
                                 list.pairs.data() + list.first[set], list.gradients.data() + list.first[set], n_pairs,
                                 options, context.max_length, query.max_length, workspace.data(),
                                 score_gradients.data(), query_factors.data(),
                                 for_contexts ? context_out + context.view.offsets[set] * dim : nullptr);
        });

    const int64_t first_pair = list.first[group];
    group = group_end;
    if (!for_queries) continue;
    std::vector<std::vector<const RecomputedPair*>> by_query(query.view.n_sets);
    for (int64_t i = first_pair; i < list.first[group_end]; ++i) {
      by_query[list.pairs[i].query].push_back(&list.pairs[i]);
    }
    share_tasks<int>(
        query.view.n_sets, [] { return 0; },
        [&](int64_t set, int&) {
          const auto& pairs = by_query[set];
          if (pairs.empty()) return;
          table.query_backward(query.view, context.view, set, pairs.data(), static_cast<int64_t>(pairs.size()),
                               score_gradients.data(), query_factors.data(), query_out + query.view.offsets[set] * dim);
        });
  }
  return {torch::stable::to(query_gradient, queries.scalar_type()),
          torch::stable::to(context_gradient, contexts.scalar_type()), count};
}

Tensor cross_attention_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                              const Tensor& context_offsets, double temperature, const std::string& normalization,
                              double negative_slope, const std::string& focal, const std::string& aggregation,
                              double logsumexp_temperature, const std::string& precision) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  const auto run = queries.scalar_type() == ScalarType::Double ? forward<double> : forward<float>;
  return run(queries, query_offsets, contexts, context_offsets, options);
}

std::tuple<Tensor, Tensor, Tensor> cross_attention_scores_backward(
    const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
    const Tensor& context_offsets, double temperature, const std::string& normalization, double negative_slope,
    const std::string& focal, const std::string& aggregation, double logsumexp_temperature,
    const std::string& precision, bool for_queries, bool for_contexts) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  STD_TORCH_CHECK(grad_scores.dim() == 2 && grad_scores.size(0) == query_offsets.size(0) - 1 &&
                      grad_scores.size(1) == context_offsets.size(0) - 1,
                  "grad_scores: expected shape (query sets, context sets)");
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  const auto run = queries.scalar_type() == ScalarType::Double ? backward<double> : backward<float>;
  return run(grad_scores, queries, query_offsets, contexts, context_offsets, options, for_queries, for_contexts);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("cross_attention_scores", TORCH_BOX(&itm_fast::cross_attention_scores));
  m.impl("cross_attention_scores_backward", TORCH_BOX(&itm_fast::cross_attention_scores_backward));
}
