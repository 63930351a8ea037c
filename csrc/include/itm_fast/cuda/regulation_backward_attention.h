// Backward of regulated cross-attention on a GPU: through the attention, the alignments and the mean cosine of a tile.
#pragma once

#include "itm_fast/cuda/regulation_backward_tile.h"

namespace itm_fast::cuda {

// The gradient of v / (|v| + 1e-8), or of `vector` = v / (|v| + 1e-8) itself if `is_unit`, from that of the result. For
// a warp: call it with the norm |v| and along = <gradient, vector>. The gradient of a zero vector is zero.
struct UnitGradient {
  float scale, along;

  ITM_FAST_DEVICE UnitGradient(float norm, float dot, bool is_unit) {
    const float sum = norm + static_cast<float>(kNormEpsilon);
    scale = norm == 0.0f ? 0.0f : 1.0f / sum;
    along = norm == 0.0f ? 0.0f : is_unit ? dot / norm : dot / sum * scale / norm;
  }
  ITM_FAST_DEVICE float of(float gradient, float value) const { return gradient * scale - value * along; }
};

// Backward of normalize_over_queries for one context: replaces at(row), the raw scores, by their gradients, given those
// of the normalised scores.
template <typename At, typename Gradient>
ITM_FAST_DEVICE void differentiate_normalization(const At& at, const Gradient& gradient, int first, int last,
                                                 const PairOptions& options) {
  RowStatistics statistics;
  for (int j = first; j < last; ++j) statistics.add(at(j), options);
  const bool softmax = options.is_softmax();
  const float denominator = statistics.denominator(options), factor = softmax ? statistics.factor(options) : 0.0f;
  const auto normalized = [&](float raw) { return softmax ? expf(raw - factor) : options.clipped(raw) / denominator; };
  float along = 0.0f;
  for (int j = first; j < last; ++j) along += gradient(j) * normalized(at(j));
  // Dividing before multiplying lets the terms of a set of one query cancel exactly.
  const float scale = 1.0f / denominator, norm = sqrtf(statistics.total);
  for (int j = first; j < last; ++j) {
    const float raw = at(j), clipped = options.clipped(raw);
    float found = gradient(j) * scale;
    if (softmax) found = normalized(raw) * (gradient(j) - along);
    if (options.is_l2() && norm > 0.0f) found -= along * scale * (clipped / norm);
    if (options.is_l1() && clipped != 0.0f) found -= clipped > 0.0f ? along * scale : -along * scale;
    at(j) = options.clips && raw <= 0.0f ? found * options.negative_slope : found;
  }
}

template <typename Tile>
class AttentionBackward : private BackwardStep<Tile> {
  ITM_FAST_BACKWARD_STEP;

  // Through the mean of the cosines (Eq 5): the attended vectors become their gradients.
  ITM_FAST_DEVICE void mean_cosines() {
    const int64_t attention = p_.options.n_alignments;
    for_each_row(s_.n_rows, [&](int row) {
      const float* query = of_row(a_.queries, row);
      float *attended = of_row(a_.attended, row, attention), *out = of_row(a_.query_gradient, row);
      const float share = gradient_of(set_of(row)) / static_cast<float>(rows_of(set_of(row)));
      const float query_norm = sqrtf(dot_of(query, query, dim_)), norm = sqrtf(dot_of(attended, attended, dim_));
      const float dot = dot_of(query, attended, dim_), product = query_norm * norm;
      const float least = static_cast<float>(kNormEpsilon), direct = share / (product < least ? least : product);
      const float along = product < least ? 0.0f : -direct * (dot / product);
      const float of_query = product < least ? 0.0f : along * norm / query_norm;
      const float of_attended = product < least ? 0.0f : along * query_norm / norm;
      struct Loaded {
        float query, attended, out;
      };
      const auto load = [&](int d) -> Loaded { return {query[d], attended[d], out[d]}; };
      for_each_column(dim_, load, [&](int d, const Loaded& loaded) {
        out[d] = loaded.out + (direct * loaded.attended + of_query * loaded.query);
        attended[d] = direct * loaded.query + of_attended * loaded.attended;
      });
    });
    barrier();
  }

  // From the gradients of the alignments to those of the attended vectors.
  ITM_FAST_DEVICE void align(int step) {
    for_each_row(s_.n_rows, [&](int row) {
      const float* aligned = of_row(a_.aligned, row, step);
      float *incoming = of_row(a_.aligned_gradient, row), *gradient = of_row(a_.gradient, row);
      const UnitGradient unit(*of_row(a_.aligned_norms, row, step), dot_of(incoming, aligned, width_), true);
      for (int i = lane(); i < width_; i += 32) {
        gradient[i] = unit.of(incoming[i], aligned[i]);
        incoming[i] = 0.0f;
      }
    });
    barrier();
    turn(a_.gradient, 0, s_.n_rows, width_, a_.turned_aligned, step);
    apply_transposed(a_.gradient, 0, s_.n_rows, p_.alignment(step),
                     [&](int row, int d, float product) { of_row(a_.product, row)[d] = product; });
    for_each_row(s_.n_rows, [&](int row) {
      const float* query = of_row(a_.queries, row);
      float *attended = of_row(a_.attended, row, step), *out = of_row(a_.query_gradient, row);
      float* gradient = of_row(a_.product, row);
      const float norm = sqrtf(dot_of(attended, attended, dim_));
      const float scale = attended_scale(norm);
      struct Loaded {
        float of_difference, out;
      };
      const auto load = [&](int d) -> Loaded {
        return {2.0f * gradient[d] * (query[d] - attended[d] * scale), out[d]};
      };
      for_each_column(dim_, load, [&](int d, const Loaded& loaded) {
        out[d] = loaded.out + loaded.of_difference;
        gradient[d] = -loaded.of_difference;
      });
      const bool normalizes = p_.options.normalize_attended;
      const UnitGradient unit(norm, dot_of(gradient, attended, dim_), false);
      for_each_column(
          dim_, [&](int d) { return normalizes ? unit.of(gradient[d], attended[d]) : gradient[d]; },
          [&](int d, float of_attended) { attended[d] = of_attended; });
    });
    barrier();
  }

  // From the gradients of the attended vectors. The raw scores become their gradients.
  ITM_FAST_DEVICE void attend(int step) {
    if (s_.n_contexts == 0) return;
    const int64_t attention = attention_of(step), stride = operand_stride(dim_);
    multiply(of(a_.attended, attention), s_.n_rows, stride,
             p_.context_operand + p_.contexts.offset(s_.context) * stride, s_.n_contexts, stride, dim_,
             [&](int row, int k, float product) { of_row(a_.product, row)[k] = product; });
    through_softmax(step, attention);
    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts; i += Tile::kThreads) {
      const int k = i % s_.n_contexts, set = i / s_.n_contexts;
      const auto at = [&](int row) -> float& { return of_row(a_.raw, row, attention)[k]; };
      const auto gradient = [&](int row) { return of_row(a_.product, row)[k]; };
      differentiate_normalization(at, gradient, start_of(set), start_of(set + 1), p_.attention);
    }
    barrier();
    turn(a_.attention, attention, s_.n_rows, s_.n_contexts, a_.turned_attention, attention);
    turn(a_.raw, attention, s_.n_rows, s_.n_contexts, a_.turned_scores, attention);
    struct Loaded {
      float out, channel, query, of_channel;
    };
    const bool channels = has_channels(step);
    const auto load = [&](int row, int d) -> Loaded {
      const float out = of_row(a_.query_gradient, row)[d];
      if (!channels) return {out, 1.0f, 0.0f, 0.0f};
      return {out, channel_of(step, row, d), of_row(a_.queries, row)[d], of_row(a_.channels_gradient, row)[d]};
    };
    multiply(of(a_.raw, attention), s_.n_rows, p_.columns, p_.transposed + p_.transposed_start(s_.context) * dim_, dim_,
             operand_stride(s_.n_contexts), s_.n_contexts, load,
             [&](int row, int d, float product, const Loaded& loaded) {
               of_row(a_.query_gradient, row)[d] = loaded.out + product * loaded.channel;
               if (channels) of_row(a_.channels_gradient, row)[d] = loaded.of_channel + product * loaded.query;
             });
  }

 private:
  // `product`, the gradients of the attention, become those of the normalised scores. Ends with a barrier.
  ITM_FAST_DEVICE void through_softmax(int step, int64_t attention) {
    for_each_row(s_.n_rows, [&](int row) {
      const float *weights = of_row(a_.attention, row, attention), *scores = normalized(row, attention);
      const float temperature = temperature_of(step, row);
      float* gradient = of_row(a_.product, row);
      const float mean = dot_of(weights, gradient, s_.n_contexts);
      const float of_temperature = sum_of(s_.n_contexts, [&](int k) {
        const float of_logit = weights[k] * (gradient[k] - mean);
        gradient[k] = of_logit * temperature;
        return of_logit * scores[k];
      });
      if (lane() == 0) *of_row(a_.temperature_gradient, row) += of_temperature;
    });
    barrier();
  }
};

}  // namespace itm_fast::cuda
