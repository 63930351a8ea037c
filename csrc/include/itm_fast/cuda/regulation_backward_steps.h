// Backward of regulated cross-attention on a GPU: through both regulators and the scores of a tile.
#pragma once

#include "itm_fast/cuda/regulation_backward_attention.h"

namespace itm_fast::cuda {

template <typename Tile>
class RegulatorsBackward : private BackwardStep<Tile> {
  ITM_FAST_BACKWARD_STEP;

  // From the gradients of the last alignments.
  ITM_FAST_DEVICE void take_gradients() {
    for_each_number(s_.n_rows, width_, [&](int row, int i) {
      of_row(a_.aligned_gradient, row)[i] =
          b_.gradients[(s_.context * p_.queries.n_rows + query_row(row)) * width_ + i];
    });
    barrier();
  }

  // From the gradients of the scores to that of the last guidance.
  ITM_FAST_DEVICE void score() {
    for_each_row(s_.n_sets, [&](int set) {
      const float* guidance = of_row(a_.guidance, set, p_.options.n_aggregations);
      float *scored = of_row(a_.scored, set), *out = of_row(a_.guidance_gradient, set);
      const float norm = sqrtf(dot_of(guidance, guidance, width_));
      const float scale = p_.options.normalize_mean ? 1.0f / (norm + static_cast<float>(kNormEpsilon)) : 1.0f;
      for (int i = lane(); i < width_; i += 32) scored[i] = guidance[i] * scale;
      const float value = dot_of(scored, p_.score.weight, width_) + *p_.score.bias;
      const bool is_tanh = p_.options.activation == Activation::tanh;
      const float score = is_tanh ? tanhf(value) : 1.0f / (1.0f + expf(-value));
      const float gradient = gradient_of(set) * (is_tanh ? 1.0f - score * score : score * (1.0f - score));
      if (lane() == 0) *of_row(a_.score_gradient, set) = gradient;
      for (int i = lane(); i < width_; i += 32) out[i] = gradient * p_.score.weight[i];
      if (!p_.options.normalize_mean) return;
      const UnitGradient unit(norm, dot_of(out, guidance, width_), false);
      for (int i = lane(); i < width_; i += 32) out[i] = unit.of(out[i], guidance[i]);
    });
    barrier();
  }

  ITM_FAST_DEVICE void take_means() {
    for_each_number(s_.n_rows, width_, [&](int row, int i) {
      const int set = set_of(row);
      of_row(a_.aligned_gradient, row)[i] += of_row(a_.guidance_gradient, set)[i] / static_cast<float>(rows_of(set));
    });
    barrier();
  }

  ITM_FAST_DEVICE void aggregate(int step, int64_t aligned_step) {
    weigh_guides(step);
    for_each_row(s_.n_sets, [&](int set) {
      through_gathering(set, step, aligned_step);
      warp_sync();
      through_logits(set, step);
    });
    barrier();
    turn(a_.guide, step, s_.n_sets, width_, a_.turned_guide, step);
    turn(a_.local, step, s_.n_rows, width_, a_.turned_local, step);
    add_transposed(a_.guide, step, s_.n_sets, p_.aggregation(step, 0), a_.guidance_gradient);
    add_transposed(a_.local, step, s_.n_rows, p_.aggregation(step, 1), a_.aligned_gradient);
  }

  ITM_FAST_DEVICE void correspond(int step) {
    shift_temperatures(step);
    const LayerOperand<float>&wide_layer = p_.correspondence(step, 0), &narrow_layer = p_.correspondence(step, 2);
    add_seen(narrow_layer, a_.turned_narrow, step);
    struct Loaded {
      float change, value, gradient;
    };
    const auto load = [&](int row, int d) -> Loaded {
      const float change = of_row(a_.changes, row, step)[d];
      return {change, changed_channel(step, row, d, change), of_row(a_.channels_gradient, row)[d]};
    };
    for_each_number(s_.n_rows, dim_, load, [&](int row, int d, const Loaded& loaded) {
      // Within the bounds; NaN is not.
      const float passed = loaded.value >= -1.0f && loaded.value <= 1.0f ? loaded.gradient : 0.0f;
      of_row(a_.changes, row, step)[d] = passed * (1.0f - loaded.change * loaded.change);
      of_row(a_.channels_gradient, row)[d] = p_.options.residual_correspondence ? passed : 0.0f;
    });
    barrier();
    turn(a_.changes, step, s_.n_rows, dim_, a_.turned_changes, step);
    apply_transposed(a_.changes, step, s_.n_rows, p_.correspondence(step, 1), [&](int row, int i, float product) {
      const float hidden = of_row(a_.hidden, row, step)[i];
      of_row(a_.gradient, row)[i] = product * (1.0f - hidden * hidden);
    });
    add_seen(wide_layer, a_.turned_hidden, step);
  }

 private:
  // Through the norm and the weighted sum of a set, for a warp: the weights become the gradients of the logits.
  ITM_FAST_DEVICE void through_gathering(int set, int step, int64_t aligned_step) {
    const bool residual = p_.options.residual_aggregation, normalizes = p_.options.normalize_guidance;
    float *gathered = of_row(a_.gathered, set), *incoming = of_row(a_.guidance_gradient, set);
    for (int i = lane(); i < width_; i += 32) gathered[i] = gather(set, step, aligned_step, i);
    const float norm = sqrtf(dot_of(gathered, gathered, width_));
    const UnitGradient unit(norm, dot_of(incoming, gathered, width_), false);
    for (int i = lane(); i < width_; i += 32) {
      const float of_result = normalizes ? unit.of(incoming[i], gathered[i]) : incoming[i];
      const float gradient = of_result * (residual ? 0.5f : 1.0f);
      gathered[i] = gradient;
      incoming[i] = residual ? gradient : 0.0f;
    }
    float mean = 0.0f;
    for (int row = start_of(set); row < start_of(set + 1); ++row) {
      mean += *of_row(a_.logits, row, step) * dot_of(gathered, of_row(a_.aligned, row, aligned_step), width_);
    }
    for (int row = start_of(set); row < start_of(set + 1); ++row) {
      const float weight = *of_row(a_.logits, row, step);
      const float along = dot_of(gathered, of_row(a_.aligned, row, aligned_step), width_);
      for (int i = lane(); i < width_; i += 32) of_row(a_.aligned_gradient, row)[i] += weight * gathered[i];
      warp_sync();  // All lanes have read the weight.
      if (lane() == 0) *of_row(a_.logits, row, step) = weight * (along - mean);
    }
  }

  // Through the logits of a set, for a warp: `local` and `guide` become the gradients of the sums in their tanh.
  ITM_FAST_DEVICE void through_logits(int set, int step) {
    const ChannelDropout dropout(p_.options.dropout, p_.seed);
    const float *weighted = of_row(a_.weighted, set), *v = p_.attentiveness[step].weight;
    float *of_v = of_row(a_.v_gradients, set, step), *guide = of_row(a_.guide, set, step);
    for (int row = start_of(set); row < start_of(set + 1); ++row) {
      const float of_logit = *of_row(a_.logits, row, step);
      const bool is_first = row == start_of(set);
      float* local = of_row(a_.local, row, step);
      dropout.for_each_channel(local_place(row, step), 0, width_, [&](int c, float factor) {
        const float value = local[c];
        of_v[c] = (is_first ? 0.0f : of_v[c]) + of_logit * value * factor;
        local[c] = of_logit * weighted[c] * factor * (1.0f - value * value);
      });
    }
    // of_v is the gradient of the product v * drop(tanh(A g + alpha)) so far.
    dropout.for_each_channel(guide_place(set, step), 0, width_, [&](int c, float factor) {
      const float of_product = of_v[c] * factor, value = guide[c];
      of_v[c] = of_product * value;
      guide[c] = of_product * v[c] * (1.0f - value * value);
    });
  }

  // Through the temperatures: `gradient` becomes that of the sums of the narrow layer.
  ITM_FAST_DEVICE void shift_temperatures(int step) {
    const float* w4 = p_.shifts[step].weight;
    for_each_row(s_.n_rows, [&](int row) {
      float& of_temperature = *of_row(a_.temperature_gradient, row);
      const bool is_zero = *of_row(a_.temperatures, row, step) == 0.0f;
      const float shift = is_zero ? 0.0f : of_temperature, *narrow = of_row(a_.narrow, row, step);
      for (int i = lane(); i < p_.correspondence(step, 2).outputs; i += 32) {
        of_row(a_.gradient, row)[i] = shift * w4[i] * (1.0f - narrow[i] * narrow[i]);
      }
      warp_sync();  // All lanes have read the gradient.
      if (lane() != 0) return;
      *of_row(a_.shift_gradients, row, step) = shift;
      if (!p_.options.residual_correspondence) of_temperature = 0.0f;
      if (is_zero) of_temperature = 0.0f;
    });
    barrier();
  }

  // From `gradient`, that of a layer's sums, to what the layer sees.
  ITM_FAST_DEVICE void add_seen(const LayerOperand<float>& layer, const StepArray& turned, int step) {
    turn(a_.gradient, 0, s_.n_rows, layer.outputs, turned, step);
    add_transposed(a_.gradient, 0, s_.n_rows, layer, p_.options.sees_query ? a_.query_gradient : a_.aligned_gradient);
  }
};

#define ITM_FAST_DIFFERENTIATED(Class, name)                                                \
  template <typename Tile, typename... Steps>                                               \
  ITM_FAST_DEVICE_APART void name##_backward(const RegulationBackward& p, Steps... steps) { \
    Class<Tile>(p).name(steps...);                                                          \
  }
ITM_FAST_DIFFERENTIATED(AttentionBackward, mean_cosines)
ITM_FAST_DIFFERENTIATED(AttentionBackward, align)
ITM_FAST_DIFFERENTIATED(AttentionBackward, attend)
ITM_FAST_DIFFERENTIATED(RegulatorsBackward, take_gradients)
ITM_FAST_DIFFERENTIATED(RegulatorsBackward, score)
ITM_FAST_DIFFERENTIATED(RegulatorsBackward, take_means)
ITM_FAST_DIFFERENTIATED(RegulatorsBackward, aggregate)
ITM_FAST_DIFFERENTIATED(RegulatorsBackward, correspond)
#undef ITM_FAST_DIFFERENTIATED

}  // namespace itm_fast::cuda
