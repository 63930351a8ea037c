// Backward of regulated cross-attention on a GPU: the forward of a tile again, which keeps every step.
#pragma once

#include "itm_fast/cuda/regulation_backward_tile.h"

namespace itm_fast::cuda {

template <typename Tile>
class RecomputedSteps : private BackwardStep<Tile> {
  ITM_FAST_BACKWARD_STEP;

  // Copies the query rows, and clears the gradients that steps add to.
  ITM_FAST_DEVICE void start() {
    const bool reweights = p_.options.learned_factors || p_.options.n_correspondences > 0;
    for_each_row(s_.n_rows, [&](int row) {
      const float* query = p_.queries.values + query_row(row) * dim_;
      for_each_column(
          dim_, [&](int d) { return query[d]; },
          [&](int d, float number) {
            of_row(a_.queries, row)[d] = number;
            of_row(a_.query_gradient, row)[d] = 0.0f;
            if (reweights) of_row(a_.channels_gradient, row)[d] = 0.0f;
          });
      for (int i = lane(); i < width_; i += 32) of_row(a_.aligned_gradient, row)[i] = 0.0f;
      if (lane() == 0) *of_row(a_.temperature_gradient, row) = 0.0f;
    });
    for_each_number(s_.n_sets, width_, [&](int set, int i) { of_row(a_.guidance_gradient, set)[i] = 0.0f; });
    barrier();
  }

  ITM_FAST_DEVICE void attend(int step) {
    const int64_t attention = attention_of(step), stride = operand_stride(dim_);
    const bool reweights = has_channels(step);
    if (s_.n_contexts == 0) {
      for_each_number(s_.n_rows, dim_, [&](int row, int d) { of_row(a_.attended, row, attention)[d] = 0.0f; });
      barrier();
      return;
    }
    if (reweights) {
      for_each_number(
          s_.n_rows, dim_, [&](int row, int d) { return of_row(a_.queries, row)[d] * channel_of(step, row, d); },
          [&](int row, int d, float number) { of_row(a_.reweighted, row, attention)[d] = number; });
    }
    multiply(reweights ? of(a_.reweighted, attention) : of(a_.queries), s_.n_rows, stride,
             p_.context_operand + p_.contexts.offset(s_.context) * stride, s_.n_contexts, stride, dim_,
             [&](int row, int k, float product) { of_row(a_.raw, row, attention)[k] = product; });
    normalize(attention);
    for_each_row(s_.n_rows, [&](int row) {
      float *weights = of_row(a_.attention, row, attention), *scores = normalized(row, attention);
      const auto at = [&](int k) { return scores[k]; };
      const auto store = [&](int k, float weight) { weights[k] = weight; };
      attend_contexts<Tile>(at, store, s_.n_contexts, temperature_of(step, row), p_.attention.focal);
    });
    multiply(of(a_.attention, attention), s_.n_rows, p_.columns, p_.transposed + p_.transposed_start(s_.context) * dim_,
             dim_, operand_stride(s_.n_contexts), s_.n_contexts,
             [&](int row, int d, float product) { of_row(a_.attended, row, attention)[d] = product; });
  }

  // Eq 7.
  ITM_FAST_DEVICE void align(int step) {
    for_each_row(s_.n_rows, [&](int row) {
      const float *query = of_row(a_.queries, row), *attended = of_row(a_.attended, row, step);
      float* squares = of_row(a_.squares, row, step);
      const float scale = attended_scale(sqrtf(dot_of(attended, attended, dim_)));
      for_each_column(
          dim_, [&](int d) { return query[d] - attended[d] * scale; },
          [&](int d, float difference) { squares[d] = difference * difference; });
    });
    apply_layer(a_.squares, step, s_.n_rows, p_.alignment(step),
                [&](int row, int i, float sum) { of_row(a_.aligned, row, step)[i] = sum; });
    for_each_row(s_.n_rows, [&](int row) {
      float* aligned = of_row(a_.aligned, row, step);
      const float norm = sqrtf(dot_of(aligned, aligned, width_));
      const float scale = 1.0f / (norm + static_cast<float>(kNormEpsilon));
      for (int i = lane(); i < width_; i += 32) aligned[i] *= scale;
      if (lane() == 0) *of_row(a_.aligned_norms, row, step) = norm;
    });
    barrier();
  }

  // Eq 8.
  ITM_FAST_DEVICE void correspond(int step) {
    const VectorLayer& shift = p_.shifts[step];
    const LayerOperand<float>& narrow_layer = p_.correspondence(step, 2);
    apply_layer(seen(), seen_step(step), s_.n_rows, narrow_layer,
                [&](int row, int i, float sum) { of_row(a_.narrow, row, step)[i] = tanhf(sum); });
    for_each_row(s_.n_rows, [&](int row) {
      float sum = dot_of(of_row(a_.narrow, row, step), shift.weight, narrow_layer.outputs) + *shift.bias;
      if (p_.options.residual_correspondence) sum += temperature_of(step, row);
      if (lane() == 0) *of_row(a_.temperatures, row, step) = sum < 0.0f ? 0.0f : sum;
    });
    apply_layer(seen(), seen_step(step), s_.n_rows, p_.correspondence(step, 0),
                [&](int row, int i, float sum) { of_row(a_.hidden, row, step)[i] = tanhf(sum); });
    apply_layer(a_.hidden, step, s_.n_rows, p_.correspondence(step, 1), [&](int row, int d, float sum) {
      const float change = tanhf(sum), value = changed_channel(step, row, d, change);
      of_row(a_.changes, row, step)[d] = change;
      of_row(a_.channels, row, step)[d] = value < -1.0f ? -1.0f : value > 1.0f ? 1.0f : value;
    });
  }

  // guidance = the mean of each set's alignments.
  ITM_FAST_DEVICE void take_means(int64_t aligned_step) {
    for_each_number(s_.n_sets, width_, [&](int set, int i) {
      float sum = 0.0f;
      for (int row = start_of(set); row < start_of(set + 1); ++row) sum += of_row(a_.aligned, row, aligned_step)[i];
      of_row(a_.guidance, set)[i] = sum / static_cast<float>(rows_of(set));
    });
    barrier();
  }

  // Eq 15 and 16.
  ITM_FAST_DEVICE void aggregate(int step, int64_t aligned_step) {
    apply_layer(a_.guidance, step, s_.n_sets, p_.aggregation(step, 0),
                [&](int set, int i, float sum) { of_row(a_.guide, set, step)[i] = tanhf(sum); });
    apply_layer(a_.aligned, aligned_step, s_.n_rows, p_.aggregation(step, 1),
                [&](int row, int i, float sum) { of_row(a_.local, row, step)[i] = tanhf(sum); });
    weigh_guides(step);
    const ChannelDropout dropout(p_.options.dropout, p_.seed);
    for_each_row(s_.n_rows, [&](int row) {
      const float *local = of_row(a_.local, row, step), *weighted = of_row(a_.weighted, set_of(row));
      float sum = 0.0f;
      dropout.for_each_channel(local_place(row, step), 0, width_,
                               [&](int c, float factor) { sum += local[c] * factor * weighted[c]; });
      sum = add_lanes(sum);
      if (lane() == 0) *of_row(a_.logits, row, step) = sum + *p_.attentiveness[step].bias;
    });
    barrier();
    for (int set = thread_index(); set < s_.n_sets; set += Tile::kThreads) {
      const auto at = [&](int row) -> float& { return *of_row(a_.logits, row, step); };
      softmax_of_rows(at, start_of(set), start_of(set + 1));
    }
    barrier();
    for_each_row(s_.n_sets, [&](int set) {
      float* next = of_row(a_.guidance, set, step + 1);
      for (int i = lane(); i < width_; i += 32) next[i] = gather(set, step, aligned_step, i);
      if (!p_.options.normalize_guidance) return;
      const float scale = 1.0f / (sqrtf(dot_of(next, next, width_)) + static_cast<float>(kNormEpsilon));
      for (int i = lane(); i < width_; i += 32) next[i] *= scale;
    });
    barrier();
  }

 private:
  // Normalises the raw scores over the rows of each set. Ends with a barrier.
  ITM_FAST_DEVICE void normalize(int64_t attention) const {
    for_each_number(
        s_.n_rows, s_.n_contexts, [&](int row, int k) { return of_row(a_.raw, row, attention)[k]; },
        [&](int row, int k, float raw) { normalized(row, attention)[k] = raw; });
    barrier();
    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts; i += Tile::kThreads) {
      const int k = i % s_.n_contexts, set = i / s_.n_contexts;
      const auto at = [&](int row) -> float& { return normalized(row, attention)[k]; };
      normalize_over_queries(at, start_of(set), start_of(set + 1), p_.attention);
    }
    barrier();
  }
};

#define ITM_FAST_RECOMPUTED(name)                                                        \
  template <typename Tile, typename... Steps>                                            \
  ITM_FAST_DEVICE_APART void name##_again(const RegulationBackward& p, Steps... steps) { \
    RecomputedSteps<Tile>(p).name(steps...);                                             \
  }
ITM_FAST_RECOMPUTED(start)
ITM_FAST_RECOMPUTED(attend)
ITM_FAST_RECOMPUTED(align)
ITM_FAST_RECOMPUTED(correspond)
ITM_FAST_RECOMPUTED(take_means)
ITM_FAST_RECOMPUTED(aggregate)
#undef ITM_FAST_RECOMPUTED

}  // namespace itm_fast::cuda
