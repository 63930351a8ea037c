// triplet_loss and hardest_negatives on the CPU: scan the scores and turn the results into losses.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/triplet_scan.h"
#include "ops/triplet_loss.h"

namespace itm_fast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
std::tuple<Tensor, Tensor> forward(const Tensor& scores, const std::optional<Tensor>& positives,
                                   const std::optional<Tensor>& positive_scores, const TripletOptions& options) {
  const Problem<T> problem(scores, positives, positive_scores);
  return losses_of(problem, scan_scores(problem, options), options, scores);
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
