// Shared by the launchers of cross_attention_scores, matching_loss and maxsim_scores: operands; for the first two, the
// parameters and the first launch.
#pragma once

#include "cuda/cross_attention_operands.h"
#include "itm_fast/cuda/cross_attention_launch.h"

namespace itm_fast::cuda {

// Blocks per multiprocessor. Products of several parts need more registers per thread than are left with two.
constexpr int blocks_together(int parts) { return parts == 1 ? 2 : 1; }

// Blocks of 77 KB of shared memory that fit a multiprocessor: two where it has 164 KB or more, one where it has 100 KB.
// There, a bound for two would only cost registers.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
inline constexpr int kFittingBlocks = 1;
#else
inline constexpr int kFittingBlocks = 2;
#endif

// Without the workspace and the scores.
template <typename S>
ScoreProblem<S> score_problem(const Operand<S>& queries, const Operand<S>& contexts,
                              const CrossAttentionOptions& options) {
  ScoreProblem<S> p{};
  p.queries = queries.rows();
  p.contexts = contexts.rows();
  p.dim = queries.values.size(1);
  p.options = PairOptions(options);
  p.is_aligned = rows_are_aligned(p.queries, p.contexts, p.dim);
  return p;
}

// Runs prepare_scores; cross_attention.cu compiles it for all three storage types.
template <typename S>
void launch_preparation(const ScoreProblem<S>& p, const DeviceStream& device);
template <typename S>
void launch_preparation(const PreparationOfBoth<S>& p, const DeviceStream& device);

// Calls run(operand of queries, operand of contexts, number of parts of their products).
template <typename Run>
auto with_operands(const torch::stable::Tensor& queries, const torch::stable::Tensor& query_offsets,
                   const torch::stable::Tensor& contexts, const torch::stable::Tensor& context_offsets,
                   const std::string& precision, const Run& run) {
  return with_rows(queries.scalar_type(), [&]<typename S>(S) {
    const Operand<S> of_queries(queries, query_offsets), of_contexts(contexts, context_offsets);
    if constexpr (std::is_same_v<S, float>) {
      if (precision == "bf16x3") return run(of_queries, of_contexts, std::integral_constant<int, 2>());
      if (precision != "bf16") return run(of_queries, of_contexts, std::integral_constant<int, 3>());
    }
    return run(of_queries, of_contexts, std::integral_constant<int, 1>());
  });
}

}  // namespace itm_fast::cuda
