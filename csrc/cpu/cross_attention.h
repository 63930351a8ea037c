// Shared by forward and backward of cross_attention_scores on the CPU: operands, runs of sets, Gram matrices, and how
// threads share the work. Each task depends only on the shapes, so results do not depend on the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/kernels/cross_attention.h"
#include "cpu/kernels/select.h"
#include "cpu/memory.h"
#include "ops/cross_attention.h"

namespace itm_fast {

// Columns of a tile. Its raw scores and attention stay in a core's second-level cache: 144 x 256 float32 are 147 kB
// each.
constexpr int64_t kTileColumns = 256;

// The kernels for rows stored as S, a type that is also the compute type.
inline const CrossAttentionKernels<float, float>& kernels(float) { ITM_FAST_RETURN_SELECTED(kCrossAttentionFloat32) }
inline const CrossAttentionKernels<double, double>& kernels(double) { ITM_FAST_RETURN_SELECTED(kCrossAttentionFloat64) }
inline const CrossAttentionKernels<BFloat16, float>& kernels(BFloat16) {
  ITM_FAST_RETURN_SELECTED(kCrossAttentionBFloat16)
}

template <typename S>
constexpr torch::headeronly::ScalarType kScalarType =
    std::is_same_v<S, double>     ? torch::headeronly::ScalarType::Double
    : std::is_same_v<S, BFloat16> ? torch::headeronly::ScalarType::BFloat16
                                  : torch::headeronly::ScalarType::Float;

// Null if float32 is faster than every available way to multiply with bfloat16.
inline const LowPrecisionProducts* low_precision_products() {
  switch (selected_isa()) {
#ifdef ITM_FAST_HAVE_AMX
    case Isa::amx:
      return &amx::kLowPrecisionProducts;
    case Isa::avx512_bf16:
      return &avx512_bf16::kLowPrecisionProducts;
#endif
    default:
      return nullptr;
  }
}

// The fastest kernels that are at least as precise as requested.
template <typename S, typename T>
const ProductKernels<S, T>& product_kernels([[maybe_unused]] const std::string& precision) {
  const ProductKernels<S, T>& exact = kernels(S{}).products;
  const LowPrecisionProducts* low = low_precision_products();
  if constexpr (std::is_same_v<T, float>) {
    if (low == nullptr) return exact;
    if constexpr (std::is_same_v<S, BFloat16>) {
      return low->bf16_of_bf16;
    } else {
      if (precision == "bf16") return low->bf16;
      if (precision == "bf16x3" && low->bf16x3.score_tile != nullptr) return low->bf16x3;
    }
  }
  return exact;
}

// Calls run(S{}, T{}) with the storage type of the rows and the type of the scores.
template <typename Run>
auto with_types(torch::headeronly::ScalarType dtype, Run run) {
  using torch::headeronly::ScalarType;
  if (dtype == ScalarType::Double) return run(double{}, double{});
  if (dtype == ScalarType::BFloat16) return run(BFloat16{}, float{});
  return run(float{}, float{});
}

// Fragments in the kernels' dtype. Offsets are clamped, so that invalid ones cannot lead outside the values.
template <typename S>
class Operand {
 public:
  Operand(const torch::stable::Tensor& values, const torch::stable::Tensor& offsets)
      : values_(torch::stable::contiguous(torch::stable::to(values, kScalarType<S>))),
        offsets_(clamped_offsets(offsets, values.size(0))) {
    view.values = static_cast<const S*>(values_.data_ptr());
    view.offsets = offsets_.data();
    view.n_sets = static_cast<int64_t>(offsets_.size()) - 1;
    view.dim = values.size(1);
    for (int64_t i = 0; i < view.n_sets; ++i) max_length = std::max(max_length, view.length(i));
  }

  FragmentsView<S> view;
  int64_t max_length = 0;

 private:
  static std::vector<int64_t> clamped_offsets(const torch::stable::Tensor& offsets, int64_t n_rows) {
    const torch::stable::Tensor wide =
        torch::stable::contiguous(torch::stable::to(offsets, torch::headeronly::ScalarType::Long));
    const auto* source = static_cast<const int64_t*>(wide.data_ptr());
    std::vector<int64_t> result(source, source + wide.size(0));
    int64_t previous = result.front() = 0;
    for (int64_t& offset : result) previous = offset = std::clamp(offset, previous, n_rows);
    return result;
  }

  torch::stable::Tensor values_;
  std::vector<int64_t> offsets_;
};

// Cuts the sets [first, last) into runs of at most `max_rows` rows; a longer set is a run by itself. Returns the first
// set of each run, and `last`.
template <typename S>
std::vector<int64_t> cut_into_runs(const FragmentsView<S>& view, int64_t first, int64_t last, int64_t max_rows) {
  std::vector<int64_t> bounds{first};
  for (int64_t i = first; i < last; ++i) {
    if (i > bounds.back() && view.offsets[i + 1] - view.offsets[bounds.back()] > max_rows) bounds.push_back(i);
  }
  if (last > first) bounds.push_back(last);
  return bounds;
}

// Runs body(task, thread_state) for all tasks; threads take the next task when they become free.
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

// Offset of the Gram matrix of each context set, and the end of the last one.
template <typename S>
std::vector<int64_t> gram_offsets(const FragmentsView<S>& contexts) {
  std::vector<int64_t> offsets(contexts.n_sets + 1);
  for (int64_t i = 0; i < contexts.n_sets; ++i) {
    offsets[i + 1] = offsets[i] + kernels(S{}).gram_size(contexts.length(i));
  }
  return offsets;
}

template <typename S, typename T>
void fill_grams(const Operand<S>& contexts, const std::vector<int64_t>& offsets, T* values) {
  const FragmentsView<S>& view = contexts.view;
  torch::stable::parallel_for(0, view.n_sets, 1, [&](int64_t first, int64_t last) {
    Buffer<T> rows(std::is_same_v<S, T> ? 0 : contexts.max_length * view.dim);
    for (int64_t i = first; i < last; ++i) kernels(S{}).gram(view, i, rows.data(), values + offsets[i]);
  });
}

template <typename S, typename T>
Grams<T> gram_matrices(const Operand<S>& contexts) {
  Grams<T> grams;
  grams.offsets = gram_offsets(contexts.view);
  grams.values = Buffer<T>(grams.offsets.back());
  fill_grams(contexts, grams.offsets, grams.values.data());
  return grams;
}

}  // namespace itm_fast
