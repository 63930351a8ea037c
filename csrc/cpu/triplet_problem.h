// Shared by the losses over a score matrix on the CPU: the problem and its blocks of rows.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/kernels/select.h"
#include "cpu/kernels/triplet_loss.h"
#include "itm_fast/triplet_loss.h"
#include "ops/triplet_loss.h"

namespace itm_fast {

// Blocks depend only on the shape, so results do not depend on the number of threads.
inline constexpr int64_t kBlockRows = 64;
// With fewer scores than this, a second thread is not worth its cost.
inline constexpr int64_t kElementsPerThread = int64_t{1} << 15;

template <typename T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

inline const TripletKernels<float>& triplet_kernels(float) { ITM_FAST_RETURN_SELECTED(kTripletFloat32) }
inline const TripletKernels<double>& triplet_kernels(double) { ITM_FAST_RETURN_SELECTED(kTripletFloat64) }

// The margin for the value r of the anchor branch.
template <typename T>
T margin_at(const Margin<T>& margin, T r) {
  if (!margin.is_soft()) return margin.size;
  return T(2) * margin.size / (T(1) + std::exp(margin.slope * (r - margin.end))) - margin.size;
}

// The score matrix, the excluded pairs, and the score of each anchor's positive.
template <typename T>
class Problem {
 public:
  Problem(const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& positives,
          const std::optional<torch::stable::Tensor>& positive_scores)
      : rows(scores.size(0)),
        columns(scores.size(1)),
        padded_columns(padded_to_lanes(columns)),
        n_blocks((rows + kBlockRows - 1) / kBlockRows),
        has_diagonal(!positive_scores),
        scores_(torch::stable::contiguous(scores)) {
    this->scores = static_cast<const T*>(scores_.const_data_ptr());
    if (positives) {
      positives_ = torch::stable::contiguous(*positives);
      this->positives = static_cast<const uint8_t*>(positives_->const_data_ptr());
    }
    anchors_.assign(padded_to_lanes(positive_scores ? positive_scores->size(0) : rows), T(0));
    if (positive_scores) {
      const torch::stable::Tensor dense = torch::stable::contiguous(*positive_scores);
      std::copy_n(static_cast<const T*>(dense.const_data_ptr()), dense.size(0), anchors_.begin());
    } else {
      for (int64_t i = 0; i < rows; ++i) anchors_[i] = this->scores[i * columns + i];
    }
  }

  // For boosting_loss: the values of the anchors' positives, padded to whole vectors, and the pairs' keys.
  Problem(const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& positives,
          const std::vector<T>& own, const PairKey<T>& key)
      : Problem(scores, positives, std::nullopt) {
    anchors_ = own;
    this->key = key;
  }

  const T* anchors() const { return anchors_.data(); }

  // The value of a pair.
  T value(int64_t row, int64_t column) const {
    const int64_t at = row * columns + column;
    if (key.anchor_scores == nullptr) return scores[at];
    const T anchor_score = key.anchor_scores[at];
    const T own = key.row_own != nullptr      ? key.row_own[row] - anchor_score
                  : key.column_own != nullptr ? key.column_own[column] - anchor_score
                                              : anchor_score;
    const T gap = scores[at] - anchor_score;
    return key.margin.is_soft() ? margin_at(key.margin, own) + gap : gap;
  }

  bool is_negative(int64_t row, int64_t column) const {
    return !(has_diagonal && row == column) && !(positives != nullptr && positives[row * columns + column]);
  }

  TripletBlock<T> block(int64_t index, const TripletOptions& options) const {
    return {scores,
            positives,
            columns,
            index * kBlockRows,
            std::min(rows, (index + 1) * kBlockRows),
            has_diagonal,
            static_cast<T>(options.margin),
            options.rows() ? anchors() : nullptr,
            options.columns() ? anchors() : nullptr,
            key};
  }

  // Runs body(block) for all blocks, in parallel if there is enough work.
  template <typename Body>
  void for_blocks(const Body& body) const {
    const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, kBlockRows * columns));
    torch::stable::parallel_for(0, n_blocks, grain, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) body(block);
    });
  }

  const T* scores;
  const uint8_t* positives = nullptr;
  int64_t rows, columns, padded_columns, n_blocks;
  bool has_diagonal;
  PairKey<T> key{};

 private:
  torch::stable::Tensor scores_;
  std::optional<torch::stable::Tensor> positives_;
  std::vector<T> anchors_;
};

// One direction of a problem: anchor i is row i, or column i.
template <typename T>
struct Direction {
  const Problem<T>& problem;
  bool is_rows;

  int64_t anchors() const { return is_rows ? problem.rows : problem.columns; }
  int64_t candidates() const { return is_rows ? problem.columns : problem.rows; }
  int64_t offset(int64_t anchor, int64_t candidate) const {
    return is_rows ? anchor * problem.columns + candidate : candidate * problem.columns + anchor;
  }
  T value(int64_t anchor, int64_t candidate) const {
    return is_rows ? problem.value(anchor, candidate) : problem.value(candidate, anchor);
  }
  bool is_negative(int64_t anchor, int64_t candidate) const {
    return is_rows ? problem.is_negative(anchor, candidate) : problem.is_negative(candidate, anchor);
  }
  // Returns -1 if there is no negative.
  int64_t first_negative(int64_t anchor) const {
    for (int64_t i = 0; i < candidates(); ++i) {
      if (is_negative(anchor, i)) return i;
    }
    return -1;
  }
  double sum_of_hinges(int64_t anchor, T margin) const {
    double sum = 0.0;
    for (int64_t i = 0; i < candidates(); ++i) {
      if (is_negative(anchor, i)) sum += hinge(margin, value(anchor, i), problem.anchors()[anchor]);
    }
    return sum;
  }
  // A square batch holds the anchor's positive among its negatives; separate positives are added to them.
  T divisor(const TripletOptions& options) const {
    const int64_t batch = candidates() + (problem.has_diagonal ? 0 : 1);
    return static_cast<T>(std::max<int64_t>(1, batch - (options.selective_divisor == SelectiveDivisor::negatives)));
  }
};

}  // namespace itm_fast
