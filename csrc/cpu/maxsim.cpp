// maxsim_scores on the CPU. Scores of all pairs are computed tile by tile, those of listed pairs one by one. The
// backward first finds the maxima of every pair with a gradient, then adds rows set by set, in the order of the pairs.
// Each task depends only on the operands, so results do not depend on the number of threads.
#include "ops/maxsim.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <tuple>

#include "cpu/cross_attention.h"
#include "cpu/kernels/maxsim.h"
#include "ops/devices.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Context rows of a task, unless one set has more.
constexpr int64_t kTaskRows = 1152;

const MaxsimKernels<float, float>& exact_kernels(float) { ITM_FAST_RETURN_SELECTED(kMaxsimFloat32) }
const MaxsimKernels<double, double>& exact_kernels(double) { ITM_FAST_RETURN_SELECTED(kMaxsimFloat64) }
const MaxsimKernels<BFloat16, float>& exact_kernels(BFloat16) { ITM_FAST_RETURN_SELECTED(kMaxsimBFloat16) }

// The fastest kernels that are at least as precise as requested.
template <typename S, typename T>
const MaxsimKernels<S, T>& maxsim_kernels([[maybe_unused]] const std::string& precision) {
#ifdef ITM_FAST_HAVE_AMX
  const bool amx = selected_isa() == Isa::amx;
  if (amx || selected_isa() == Isa::avx512_bf16) {
    const LowPrecisionMaxsim& low = amx ? amx::kLowPrecisionMaxsim : avx512_bf16::kLowPrecisionMaxsim;
    if constexpr (std::is_same_v<S, BFloat16>) return low.bf16_of_bf16;
    if constexpr (std::is_same_v<S, float>) {
      if (precision == "bf16") return low.bf16;
    }
  }
#endif
  return exact_kernels(S{});
}

struct SetPair {
  int32_t query, context;
};

template <typename S>
void check_sizes(const char* name, const Operand<S>& sets) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(sets.view.n_sets <= most && sets.max_length <= most, name,
                  ": expected at most 2^31 - 1 sets and as many rows in a set");
}

std::vector<SetPair> listed_pairs(const Tensor& pairs, int64_t n_queries, int64_t n_contexts) {
  const Tensor dense = torch::stable::contiguous(pairs);
  const auto* numbers = static_cast<const int64_t*>(dense.const_data_ptr());
  std::vector<SetPair> result(dense.size(0));
  for (size_t p = 0; p < result.size(); ++p) {
    const int64_t query = numbers[2 * p], context = numbers[2 * p + 1];
    STD_TORCH_CHECK(query >= 0 && query < n_queries, "pairs: expected query sets from 0 to ", n_queries - 1, ", got ",
                    query, " in pair ", p);
    STD_TORCH_CHECK(context >= 0 && context < n_contexts, "pairs: expected context sets from 0 to ", n_contexts - 1,
                    ", got ", context, " in pair ", p);
    result[p] = {static_cast<int32_t>(query), static_cast<int32_t>(context)};
  }
  return result;
}

// The numbers of the pairs, ordered by the set of one side: those of set s are order[starts[s]] to
// order[starts[s + 1] - 1], in ascending order.
struct BySet {
  template <typename Pair>
  BySet(const std::vector<Pair>& pairs, int32_t Pair::* own, int64_t n_sets) : starts(n_sets + 1), order(pairs.size()) {
    for (const Pair& pair : pairs) ++starts[pair.*own + 1];
    for (int64_t set = 0; set < n_sets; ++set) starts[set + 1] += starts[set];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (size_t p = 0; p < pairs.size(); ++p) order[next[pairs[p].*own]++] = static_cast<int64_t>(p);
  }
  std::vector<int64_t> starts, order;
};

// The scratch memory of a thread, and the query set that is packed in it.
template <typename T>
struct Scratch {
  Scratch(int64_t size, int64_t n_sets) : workspace(size), sums(n_sets) {}
  Buffer<T> workspace;
  std::vector<double> sums;
  std::vector<int32_t> indices;
  int64_t packed = -1;
};

// Runs body(pair number, scratch) for all pairs, ordered by query set, which is packed first.
template <typename S, typename T, typename Pair, typename Body>
void for_each_pair(const MaxsimKernels<S, T>& table, const Operand<S>& query, const std::vector<Pair>& pairs,
                   const Body& body) {
  const std::vector<int64_t> order = BySet(pairs, &Pair::query, query.view.n_sets).order;
  torch::stable::parallel_for(0, static_cast<int64_t>(order.size()), 1, [&](int64_t first, int64_t last) {
    Scratch<T> scratch(table.workspace(query.max_length, query.view.dim), 1);
    for (int64_t i = first; i < last; ++i) {
      const int64_t set = pairs[order[i]].query;
      if (set != scratch.packed) {
        table.pack(query.view, set, set + 1, query.max_length, scratch.workspace.data());
        scratch.packed = set;
      }
      body(order[i], scratch);
    }
  });
}

template <typename S, typename T>
void score_all(const MaxsimKernels<S, T>& table, const Operand<S>& query, const Operand<S>& context,
               MaxsimOptions options, T* out) {
  const std::vector<int64_t> columns = cut_into_runs(query.view, 0, query.view.n_sets, kTileColumns);
  const std::vector<int64_t> rows = cut_into_runs(context.view, 0, context.view.n_sets, kTaskRows);
  const int64_t n_columns = static_cast<int64_t>(columns.size()) - 1, n_rows = static_cast<int64_t>(rows.size()) - 1;
  const int64_t max_columns = std::max(kTileColumns, query.max_length), stride = context.view.n_sets;
  // A thread takes adjacent tasks, so that it packs each run of queries once.
  torch::stable::parallel_for(0, n_columns * n_rows, 1, [&](int64_t first, int64_t last) {
    Scratch<T> scratch(table.workspace(max_columns, query.view.dim), query.view.n_sets);
    for (int64_t task = first; task < last; ++task) {
      const int64_t column = task / n_rows, row = task % n_rows;
      if (column != scratch.packed) {
        table.pack(query.view, columns[column], columns[column + 1], max_columns, scratch.workspace.data());
        scratch.packed = column;
      }
      table.score(query.view, columns[column], columns[column + 1], context.view, rows[row], rows[row + 1], options,
                  max_columns, scratch.workspace.data(), scratch.sums.data(),
                  out + columns[column] * stride + rows[row], stride);
    }
  });
}

template <typename S, typename T>
Tensor forward(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
               const Tensor& context_offsets, const std::optional<Tensor>& pairs, MaxsimOptions options,
               const std::string& precision) {
  const MaxsimKernels<S, T>& table = maxsim_kernels<S, T>(precision);
  const Operand<S> query(queries, query_offsets), context(contexts, context_offsets);
  check_sizes("queries", query);
  check_sizes("contexts", context);
  if (!pairs.has_value()) {
    Tensor scores = torch::stable::new_empty(queries, {query.view.n_sets, context.view.n_sets}, kScalarType<T>);
    score_all(table, query, context, options, static_cast<T*>(scores.mutable_data_ptr()));
    return scores;
  }
  const std::vector<SetPair> listed = listed_pairs(*pairs, query.view.n_sets, context.view.n_sets);
  Tensor scores = torch::stable::new_empty(queries, {static_cast<int64_t>(listed.size())}, kScalarType<T>);
  auto* out = static_cast<T*>(scores.mutable_data_ptr());
  for_each_pair(table, query, listed, [&](int64_t p, Scratch<T>& scratch) {
    const SetPair pair = listed[p];
    table.score(query.view, pair.query, pair.query + 1, context.view, pair.context, pair.context + 1, options,
                query.max_length, scratch.workspace.data(), scratch.sums.data(), out + p, 1);
  });
  return scores;
}

// A pair with a gradient. Its indices begin at `begin`: the best context row of each query row, then the best query row
// of each context row, as far as the direction needs them.
template <typename T>
struct Match {
  int32_t query, context;
  T gradient;
  int64_t begin;
};

template <typename T, typename Index>
struct Matches {
  std::vector<Match<T>> pairs;
  Buffer<Index> indices;
};

template <typename S, typename T, typename Index>
Matches<T, Index> find_matches(const MaxsimKernels<S, T>& table, const Tensor& grad_scores, const Operand<S>& query,
                               const Operand<S>& context, const std::optional<Tensor>& pairs, MaxsimOptions options) {
  const Tensor dense = torch::stable::contiguous(torch::stable::to(grad_scores, kScalarType<T>));
  const auto* gradients = static_cast<const T*>(dense.const_data_ptr());
  const int64_t n_contexts = context.view.n_sets;
  std::vector<SetPair> listed;
  if (pairs.has_value()) listed = listed_pairs(*pairs, query.view.n_sets, n_contexts);
  Matches<T, Index> found;
  int64_t total = 0;
  for (int64_t p = 0; p < dense.numel(); ++p) {
    if (gradients[p] == T(0)) continue;
    const SetPair pair = pairs.has_value()
                             ? listed[p]
                             : SetPair{static_cast<int32_t>(p / n_contexts), static_cast<int32_t>(p % n_contexts)};
    const int64_t n_query = query.view.length(pair.query), n_context = context.view.length(pair.context);
    if (n_query == 0 || n_context == 0) continue;
    found.pairs.push_back({pair.query, pair.context, gradients[p], total});
    total += (options.by_queries() ? n_query : 0) + (options.by_contexts() ? n_context : 0);
  }
  found.indices = Buffer<Index>(total);
  for_each_pair(table, query, found.pairs, [&](int64_t p, Scratch<T>& scratch) {
    const Match<T>& pair = found.pairs[p];
    const int64_t n_query = options.by_queries() ? query.view.length(pair.query) : 0;
    const int64_t n_context = options.by_contexts() ? context.view.length(pair.context) : 0;
    scratch.indices.resize(n_query + n_context);
    table.match(query.view, pair.query, context.view, pair.context, query.max_length, scratch.workspace.data(),
                options.by_queries() ? scratch.indices.data() : nullptr,
                options.by_contexts() ? scratch.indices.data() + n_query : nullptr);
    std::copy(scratch.indices.begin(), scratch.indices.end(), found.indices.data() + pair.begin);
  });
  return found;
}

// The gradient of the rows of one side. `own` is the set of that side, `other` the other side's.
template <typename S, typename T, typename Index>
Tensor side_gradient(const MaxsimKernels<S, T>& table, const Matches<T, Index>& found, const Tensor& like,
                     const Operand<S>& side, int32_t Match<T>::* own, const Operand<S>& other_side,
                     int32_t Match<T>::* other, MaxsimOptions options, bool of_queries) {
  const FragmentsView<S>&view = side.view, &others = other_side.view;
  Tensor gradient = torch::stable::new_empty(like, {like.size(0), like.size(1)}, kScalarType<T>);
  auto* out = static_cast<T*>(gradient.mutable_data_ptr());
  std::fill_n(out, gradient.numel(), T(0));
  const BySet by_set(found.pairs, own, view.n_sets);
  torch::stable::parallel_for(0, view.n_sets, 1, [&](int64_t first, int64_t last) {
    std::vector<int32_t> indices;
    for (int64_t set = first; set < last; ++set) {
      T* rows = out + view.offsets[set] * view.dim;
      for (int64_t i = by_set.starts[set]; i < by_set.starts[set + 1]; ++i) {
        const Match<T>& pair = found.pairs[by_set.order[i]];
        const int64_t partner = pair.*other, length = view.length(set), partner_length = others.length(partner);
        const int64_t n_query = of_queries ? length : partner_length;
        // The rows of this side take their best partners; partners whose best row is of this side add to it.
        const auto add = [&](bool by_queries) {
          const bool scatter = by_queries != of_queries;
          const int64_t count = scatter ? partner_length : length;
          const Index* stored = found.indices.data() + pair.begin + (by_queries || !options.by_queries() ? 0 : n_query);
          indices.assign(stored, stored + count);
          const T weight =
              options.reduction == MaxsimReduction::mean ? pair.gradient / static_cast<T>(count) : pair.gradient;
          table.add_matches(indices.data(), count, scatter, weight, others.set_values(partner), view.dim, rows);
        };
        if (of_queries ? options.by_queries() : options.by_contexts()) add(of_queries);
        if (of_queries ? options.by_contexts() : options.by_queries()) add(!of_queries);
      }
    }
  });
  return torch::stable::to(gradient, like.scalar_type());
}

template <typename Index, typename S, typename T>
std::tuple<Tensor, Tensor> backward_with(const Tensor& grad_scores, const Tensor& queries, const Operand<S>& query,
                                         const Tensor& contexts, const Operand<S>& context,
                                         const std::optional<Tensor>& pairs, MaxsimOptions options,
                                         const MaxsimKernels<S, T>& table, bool for_queries, bool for_contexts) {
  const Matches<T, Index> found = find_matches<S, T, Index>(table, grad_scores, query, context, pairs, options);
  const auto none = [](const Tensor& like) {
    return torch::stable::new_empty(like, {int64_t{0}, like.size(1)}, like.scalar_type());
  };
  return {
      for_queries
          ? side_gradient(table, found, queries, query, &Match<T>::query, context, &Match<T>::context, options, true)
          : none(queries),
      for_contexts
          ? side_gradient(table, found, contexts, context, &Match<T>::context, query, &Match<T>::query, options, false)
          : none(contexts)};
}

template <typename S, typename T>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets,
                                    const Tensor& contexts, const Tensor& context_offsets,
                                    const std::optional<Tensor>& pairs, MaxsimOptions options,
                                    const std::string& precision, bool for_queries, bool for_contexts) {
  const Operand<S> query(queries, query_offsets), context(contexts, context_offsets);
  check_sizes("queries", query);
  check_sizes("contexts", context);
  const auto run = std::max(query.max_length, context.max_length) <= int64_t{1} << 16 ? backward_with<uint16_t, S, T>
                                                                                      : backward_with<int32_t, S, T>;
  return run(grad_scores, queries, query, contexts, context, pairs, options, maxsim_kernels<S, T>(precision),
             for_queries, for_contexts);
}

Tensor maxsim_scores(const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
                     const Tensor& context_offsets, const std::optional<Tensor>& pairs, const std::string& reduction,
                     const std::string& direction, const std::string& precision) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(pairs, queries);
  const MaxsimOptions options = maxsim_options(reduction, direction);
  return with_types(queries.scalar_type(), [&]<typename S, typename T>(S, T) {
    return forward<S, T>(queries, query_offsets, contexts, context_offsets, pairs, options, precision);
  });
}

std::tuple<Tensor, Tensor> maxsim_scores_backward(const Tensor& grad_scores, const Tensor& queries,
                                                  const Tensor& query_offsets, const Tensor& contexts,
                                                  const Tensor& context_offsets, const std::optional<Tensor>& pairs,
                                                  const std::string& reduction, const std::string& direction,
                                                  const std::string& precision, int64_t /*longest_query*/,
                                                  int64_t /*longest_context*/, bool for_queries, bool for_contexts) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_pairs(pairs, queries);
  check_maxsim_gradient(grad_scores, queries, query_offsets, context_offsets, pairs);
  const MaxsimOptions options = maxsim_options(reduction, direction);
  return with_types(queries.scalar_type(), [&]<typename S, typename T>(S, T) {
    return backward<S, T>(grad_scores, queries, query_offsets, contexts, context_offsets, pairs, options, precision,
                          for_queries, for_contexts);
  });
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("maxsim_scores", TORCH_BOX(&itm_fast::maxsim_scores));
  m.impl("maxsim_scores_backward", TORCH_BOX(&itm_fast::maxsim_scores_backward));
}
