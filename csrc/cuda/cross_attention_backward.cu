// The backward of cross_attention_scores on CUDA: two launches.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cuda/cross_attention_operands.h"
#include "cuda/launch.h"
#include "itm_fast/cuda/cross_attention_backward_launch.h"
#include "ops/cross_attention.h"

namespace itm_fast::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// See the kernel bodies for the grids and for which block writes what.
template <typename S>
__global__ void __launch_bounds__(kListThreads) list_pairs_kernel(const CrossAttentionBackward<S> parameters) {
  list_pairs(parameters.lists);
}

template <typename S>
__global__ void __launch_bounds__(kGradientThreads, 1)
    backpropagate_pairs_kernel(const CrossAttentionBackward<S> parameters) {
  backpropagate_pairs(parameters);
}

template <typename S>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_scores, const Operand<S>& queries,
                                            const Operand<S>& contexts, const CrossAttentionOptions& options,
                                            bool for_queries, bool for_contexts, const LongestSets& longest) {
  CrossAttentionBackward<S> p{};
  const Tensor gradients = torch::stable::to(grad_scores, ScalarType::Float);
  p.lists.queries = queries.rows();
  p.lists.contexts = contexts.rows();
  p.lists.gradients = {data_of<float>(gradients), gradients.stride(0), gradients.stride(1)};
  p.options = PairOptions(options);
  p.dim = queries.values.size(1);
  p.is_aligned = rows_are_aligned(p.lists.queries, p.lists.contexts, p.dim);
  // Without rows there is no gradient to write; a null address tells the kernels so.
  const BackwardSizes sizes{p.lists.queries.n_sets,
                            p.lists.queries.n_rows,
                            p.lists.contexts.n_sets,
                            p.lists.contexts.n_rows,
                            p.dim,
                            for_queries && queries.values.size(0) > 0,
                            for_contexts && contexts.values.size(0) > 0,
                            longest};
  Tensor of_queries = torch::stable::new_empty(queries.values, {for_queries ? sizes.query_rows : 0, p.dim});
  Tensor of_contexts = torch::stable::new_empty(contexts.values, {for_contexts ? sizes.context_rows : 0, p.dim});
  Tensor count = torch::stable::new_empty(queries.offsets, {1}, ScalarType::Long);
  p.query_gradients = for_queries ? mutable_data_of<S>(of_queries) : nullptr;
  p.context_gradients = for_contexts ? mutable_data_of<S>(of_contexts) : nullptr;
  p.lists.total = mutable_data_of<int64_t>(count);

  const DeviceStream device(queries.values);
  Workspace measured;
  place_backward(p, sizes, measured);
  const Tensor memory = scratch(queries.values, measured.bytes());
  Workspace workspace(memory.mutable_data_ptr());
  device.set_zero(memory.mutable_data_ptr(), place_backward(p, sizes, workspace));
  device.launch(list_pairs_kernel<S>, sizes.list_blocks(), kListThreads, p);
  if (sizes.propagating_blocks() > 0) {
    device.launch_together(backpropagate_pairs_kernel<S>, sizes.propagating_blocks(), kGradientThreads, p,
                           kBackwardBytes);
  }
  return {of_queries, of_contexts, count};
}

std::tuple<Tensor, Tensor, Tensor> cross_attention_scores_backward(
    const Tensor& grad_scores, const Tensor& queries, const Tensor& query_offsets, const Tensor& contexts,
    const Tensor& context_offsets, double temperature, const std::string& normalization, double negative_slope,
    const std::string& focal, const std::string& aggregation, double logsumexp_temperature,
    const std::string& precision, bool for_queries, bool for_contexts, int64_t longest_query, int64_t longest_context) {
  check_operands(queries, query_offsets, contexts, context_offsets, precision);
  check_score_gradient(grad_scores, query_offsets, context_offsets);
  const CrossAttentionOptions options =
      cross_attention_options(temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature);
  return with_rows(queries.scalar_type(), [&]<typename S>(S) {
    return backward<S>(grad_scores, Operand<S>(queries, query_offsets), Operand<S>(contexts, context_offsets), options,
                       for_queries, for_contexts, {longest_query, longest_context});
  });
}

}  // namespace
}  // namespace itm_fast::cuda

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CUDA, m) {
  m.impl("cross_attention_scores_backward", TORCH_BOX(&itm_fast::cuda::cross_attention_scores_backward));
}
