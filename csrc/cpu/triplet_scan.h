// The scan of a score matrix on the CPU: shares blocks of rows among threads, merges their results, and computes the
// losses of anchors.
#pragma once

#include <tuple>

#include "cpu/memory.h"
#include "cpu/triplet_problem.h"
#include "ops/loss_results.h"

namespace itm_fast {

// Results of the blocks, per anchor.
template <typename T>
struct Found {
  std::vector<T> best;
  std::vector<int64_t> index;
  std::vector<double> sum;
};

template <typename T>
struct ScanResult {
  Found<T> rows, columns;
};

// Adds up the blocks' sums per column; each block has `padded_columns` of them.
template <typename T, typename In, typename Out>
std::vector<Out> sum_of_blocks(const Problem<T>& problem, const In* in_blocks) {
  std::vector<Out> sums(problem.columns, Out(0));
  for (int64_t index = 0; index < problem.n_blocks; ++index) {
    const In* in_block = in_blocks + index * problem.padded_columns;
    for (int64_t j = 0; j < problem.columns; ++j) sums[j] += in_block[j];
  }
  return sums;
}

template <typename T>
ScanResult<T> scan_scores(const Problem<T>& problem, const TripletOptions& options) {
  const bool best = options.needs_hardest(), sum = options.needs_sums();
  ScanResult<T> result;
  if (options.rows() && best) {
    result.rows.best.resize(problem.rows);
    result.rows.index.resize(problem.rows);
  }
  if (options.rows() && sum) result.rows.sum.resize(problem.rows);
  const int64_t in_blocks = options.columns() ? problem.n_blocks * problem.padded_columns : 0;
  Buffer<T> block_best(best ? in_blocks : 0), block_sum(sum ? in_blocks : 0);
  Buffer<LaneInteger<T>> block_index(best ? in_blocks : 0);

  const auto& table = triplet_kernels(T());
  problem.for_blocks([&](int64_t index) {
    TripletScan<T> scan{};
    scan.semi_hard = options.mining == Mining::semi_hard;
    if (options.rows() && best) {
      scan.row_best = result.rows.best.data();
      scan.row_index = result.rows.index.data();
    }
    if (options.rows() && sum) scan.row_sum = result.rows.sum.data();
    if (options.columns() && best) {
      scan.column_best = block_best.data() + index * problem.padded_columns;
      scan.column_index = block_index.data() + index * problem.padded_columns;
    }
    if (options.columns() && sum) scan.column_sum = block_sum.data() + index * problem.padded_columns;
    table.scan(problem.block(index, options), scan);
  });

  if (options.columns() && best) {
    result.columns.best.assign(problem.columns, -kInfinity<T>);
    result.columns.index.assign(problem.columns, 0);
    for (int64_t index = 0; index < problem.n_blocks; ++index) {
      const T* values = block_best.data() + index * problem.padded_columns;
      const LaneInteger<T>* rows = block_index.data() + index * problem.padded_columns;
      for (int64_t j = 0; j < problem.columns; ++j) {
        T& held = result.columns.best[j];
        if (values[j] > held || (values[j] != values[j] && held == held)) {
          held = values[j];
          result.columns.index[j] = index * kBlockRows + rows[j];
        }
      }
    }
  }
  if (options.columns() && sum) result.columns.sum = sum_of_blocks<T, T, double>(problem, block_sum.data());
  return result;
}

template <typename T>
AnchorLoss<T> loss_of(const Direction<T>& direction, const Found<T>& found, int64_t anchor,
                      const TripletOptions& options) {
  const T positive = direction.problem.anchors()[anchor];
  double sum = options.needs_sums() ? found.sum[anchor] : 0.0;
  // Excluded scores are -inf in the blocks; -inf adds 0 to a sum unless the positive is -inf, too.
  if (options.needs_sums() && positive == -kInfinity<T>) {
    sum = direction.sum_of_hinges(anchor, static_cast<T>(options.margin));
  }
  if (options.mining == Mining::all) return {positive == positive ? static_cast<T>(sum) : positive, kAllNegatives};
  const T best = found.best[anchor];
  int64_t index = found.index[anchor];
  // With any other positive, a best of -inf has the loss 0, whether it is a negative or marks that there is none.
  if (best == -kInfinity<T> && !(positive > -kInfinity<T>)) {
    const bool none = options.mining == Mining::semi_hard && positive == positive;
    index = none ? -1 : direction.first_negative(anchor);
    if (index < 0) return {positive == positive ? T(0) : positive, kNoGradient};
  }
  return mined_loss(options, positive, best, index, static_cast<T>(sum / direction.divisor(options)));
}

// The results of triplet_loss, with dtype and device of `scores`.
template <typename T>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> losses_of(const Problem<T>& problem,
                                                                   const ScanResult<T>& found,
                                                                   const TripletOptions& options,
                                                                   const torch::stable::Tensor& scores) {
  const int64_t anchors = options.rows() ? problem.rows : problem.columns;
  const bool keep_each = options.reduction == Reduction::none;
  torch::stable::Tensor loss = new_loss(options.reduction, options.directions, anchors, scores);
  torch::stable::Tensor negatives = new_negatives(options.mining, options.directions, anchors, scores);
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

}  // namespace itm_fast
