// triplet_loss and hardest_negatives on the CPU: what the scan of the scores found becomes losses.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/triplet_scan.h"
#include "ops/loss_results.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> forward(const Tensor& scores, const std::optional<Tensor>& positives,
                                   const std::optional<Tensor>& positive_scores, const TripletOptions& options) {
  const Problem<T> problem(scores, positives, positive_scores);
  const ScanResult<T> found = scan_scores(problem, options);
  const int64_t anchors = options.rows() ? problem.rows : problem.columns;
  const bool keep_each = options.reduction == Reduction::none;
  Tensor loss = new_loss(options.reduction, options.directions, anchors, scores);
  Tensor negatives = new_negatives(options.mining, options.directions, anchors, scores);
  T* loss_out = static_cast<T*>(loss.mutable_data_ptr());
  int64_t* negatives_out = static_cast<int64_t*>(negatives.mutable_data_ptr());

  const T scale = options.halve ? T(0.5) : T(1);
  double total = 0.0;
  int64_t out = 0;
  for (const bool is_rows : {true, false}) {
    if (!(is_rows ? options.rows() : options.columns())) continue;
    const Direction<T> direction{problem, is_rows};
    for (int64_t i = 0; i < anchors; ++i, ++out) {
      const AnchorLoss<T> anchor = loss_of(direction, is_rows ? found.rows : found.columns, i, options);
      if (options.mining != Mining::all) negatives_out[out] = anchor.negative;
      if (keep_each) loss_out[out] = scale * anchor.value;
      total += anchor.value;
    }
  }
  if (options.reduction == Reduction::mean) total /= static_cast<double>(std::max<int64_t>(anchors, 1));
  if (!keep_each) *loss_out = static_cast<T>(total * scale);
  return {loss, negatives};
}

template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> hardest(const Tensor& scores, const std::optional<Tensor>& positives) {
  const Problem<T> problem(scores, positives, std::nullopt);
  TripletOptions options{};
  options.mining = Mining::hardest;
  ScanResult<T> found = scan_scores(problem, options);
  Tensor results[4];
  for (const bool is_rows : {true, false}) {
    const Direction<T> direction{problem, is_rows};
    Found<T>& side = is_rows ? found.rows : found.columns;
    for (int64_t i = 0; i < direction.anchors(); ++i) {
      if (side.best[i] == -kInfinity<T>) side.index[i] = direction.first_negative(i);
    }
    Tensor values = torch::stable::new_empty(scores, {direction.anchors()});
    Tensor indices = torch::stable::new_empty(scores, {direction.anchors()}, ScalarType::Long);
    std::copy(side.best.begin(), side.best.end(), static_cast<T*>(values.mutable_data_ptr()));
    std::copy(side.index.begin(), side.index.end(), static_cast<int64_t*>(indices.mutable_data_ptr()));
    results[is_rows ? 0 : 2] = values;
    results[is_rows ? 1 : 3] = indices;
  }
  return {results[0], results[1], results[2], results[3]};
}

std::tuple<Tensor, Tensor> triplet_loss(const Tensor& scores, const std::optional<Tensor>& positives,
                                        const std::optional<Tensor>& positive_scores, double margin,
                                        const std::string& mining, double epsilon, const std::string& selective_divisor,
                                        bool halve, const std::string& directions, const std::string& reduction) {
  const TripletOptions options =
      triplet_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction);
  check_triplet_scores(scores, positives, positive_scores, options.directions);
  const auto run = is_double(scores) ? forward<double> : forward<float>;
  return run(scores, positives, positive_scores, options);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hardest_negatives(const Tensor& scores,
                                                             const std::optional<Tensor>& positives) {
  check_triplet_scores(scores, positives, std::nullopt, Directions::both);
  return is_double(scores) ? hardest<double>(scores, positives) : hardest<float>(scores, positives);
}

}  // namespace
}  // namespace itm_fast

STABLE_TORCH_LIBRARY_IMPL(itm_fast, CPU, m) {
  m.impl("triplet_loss", TORCH_BOX(&itm_fast::triplet_loss));
  m.impl("hardest_negatives", TORCH_BOX(&itm_fast::hardest_negatives));
}
