// The steps of both regulators for a tile of regulated cross-attention on a GPU, and its scores.
#pragma once

#include "itm_fast/cuda/regulation_dropout.h"
#include "itm_fast/cuda/regulation_tile.h"

namespace itm_fast::cuda {

template <int kParts, typename Tile, typename S>
class RegulatorSteps : private RegulationStep<kParts, Tile, S> {
  ITM_FAST_REGULATION_STEP;

  // Eq 8: the temperature of every row, and the hidden layer from which reweight computes its channels.
  ITM_FAST_DEVICE void correspond(int step) {
    ITM_FAST_DYNAMIC_SHARED(float, temperatures, Memory::kTemperatures, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, kMostQueries);
    ITM_FAST_TILE_SCORES(Tile);
    const bool sees_query = p_.options.sees_query;
    const S* operand = sees_query ? p_.query_operand + s_.first_row * dim_stride_ : of_block(p_.slab.aligned_operand);
    const int64_t stride = sees_query ? dim_stride_ : width_stride_;
    const LayerOperand<S>&wide_layer = p_.correspondence(step, 0), &narrow_layer = p_.correspondence(step, 2);
    const VectorLayer& shift = p_.shifts[step];
    const int64_t hidden_stride = operand_stride(p_.hidden);
    for_each_run([&] {
      const S* seen = operand + run_ * stride;
      for_each_output(seen, n_run_, stride, narrow_layer, [&](int first, int count) {
        const bool is_last = first + count == narrow_layer.outputs;
        for_each_row_of_run([&](int row, int place) {
          float sum = 0.0f;
          for (int c = lane(); c < count; c += 32) {
            sum += shift.weight[first + c] * tanhf(scores[place * kStride + c] + narrow_layer.bias[first + c]);
          }
          sum = add_lanes(sum);
          if (lane() != 0) return;
          if (first > 0) sum += dots[row];
          dots[row] = sum;
          if (!is_last) return;
          sum += *shift.bias;
          if (p_.options.residual_correspondence) {
            sum += corresponded_ > 0 ? static_cast<float>(temperatures[row]) : first_temperature();
          }
          temperatures[row] = sum < 0.0f ? 0.0f : sum;
        });
      });
      S* hidden = hidden_of(step) + run_ * hidden_stride;
      for_each_output(seen, n_run_, stride, wide_layer, [&](int first, int count) {
        for_each_product(count, [&](int c) {
          const float bias = wide_layer.bias[first + c];
          return [=](int place, float product) {
            narrow(tanhf(product + bias), hidden[place * hidden_stride + first + c]);
          };
        });
      });
      pad_rows(hidden, n_run_, hidden_stride, wide_layer.outputs);
    });
  }

  // Eq 5, from norms and products of the attended vectors. A row's cosine replaces its product.
  ITM_FAST_DEVICE void write_mean_cosines() {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    for_each_row(s_.n_rows, [&](int row) {
      float square = 0.0f;
      for (int d = lane(); d < dim_; d += 32) square += query(row)[d] * query(row)[d];
      square = add_lanes(square);
      if (lane() == 0) dots[row] = cosine_of(dots[row], squares[row], 1.0f, sqrtf(square));
    });
    barrier();
    write_scores([&](int set) {
      float total = 0.0f;
      for (int row = starts[set]; row < starts[set + 1]; ++row) total += dots[row];
      return total / static_cast<float>(starts[set + 1] - starts[set]);
    });
  }

  ITM_FAST_DEVICE void write_zeros() const {
    write_scores([](int) { return 0.0f; });
  }

  ITM_FAST_DEVICE void write_alignments() const {
    const int64_t first = s_.context * p_.queries.n_rows + s_.first_row;
    for_each_row(s_.n_rows, [&](int row) {
      const float* aligned = of_block(p_.slab.aligned) + row * width_stride_;
      float* out = p_.alignments + (first + row) * width_;
      for (int i = lane(); i < width_; i += 32) out[i] = aligned[i];
    });
  }

  // guidance = the mean of each set's alignments. Ends with a barrier.
  ITM_FAST_DEVICE void take_means() {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    barrier();
    for (int i = thread_index(); i < s_.n_sets * width_; i += Tile::kThreads) {
      const int set = i / width_, at = i % width_, n = starts[set + 1] - starts[set];
      float sum = 0.0f;
      for (int row = starts[set]; row < starts[set + 1]; ++row) {
        sum += of_block(p_.slab.aligned)[row * width_stride_ + at];
      }
      const float mean = n > 0 ? sum / static_cast<float>(n) : 0.0f;
      of_block(p_.slab.guidance)[set * width_stride_ + at] = mean;
      narrow(mean, of_block(p_.slab.guidance_operand)[set * width_stride_ + at]);
    }
    pad_rows(of_block(p_.slab.guidance_operand), s_.n_sets, width_stride_, width_);
    barrier();
  }

  // Eq 15 and 16.
  ITM_FAST_DEVICE void aggregate(int step) {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, logits, Memory::kDots, kMostQueries);
    ITM_FAST_TILE_SCORES(Tile);
    const VectorLayer& weights = p_.attentiveness[step];
    const ChannelDropout dropout(p_.options.dropout, p_.seed);
    const LayerOperand<S>& global = p_.aggregation(step, 0);
    float* guides = of_block(p_.slab.guide);
    for_each_output(of_block(p_.slab.guidance_operand), s_.n_sets, width_stride_, global, [&](int first, int count) {
      for_each_row(s_.n_sets, [&](int set) {
        const DropoutPlace place{p_.queries.offset(s_.first_set + set), s_.context, 2 * step + 1};
        dropout.for_each_channel(place, first, count, [&](int c, float factor) {
          const float guide = tanhf(scores[set * kStride + c] + global.bias[first + c]) * factor;
          guides[set * width_stride_ + first + c] = guide * weights.weight[first + c];
        });
      });
    });
    const LayerOperand<S>& local = p_.aggregation(step, 1);
    const S* aligned = of_block(p_.slab.aligned_operand);
    for_each_run([&] {
      const S* rows = aligned + run_ * width_stride_;
      for_each_output(rows, n_run_, width_stride_, local, [&](int first, int count) {
        for_each_row_of_run([&](int row, int in_run) {
          const DropoutPlace place{s_.first_row + row, s_.context, 2 * step};
          const float* guide = guides + row_sets[row] * width_stride_ + first;
          float sum = 0.0f;
          dropout.for_each_channel(place, first, count, [&](int c, float factor) {
            sum += tanhf(scores[in_run * kStride + c] + local.bias[first + c]) * factor * guide[c];
          });
          sum = add_lanes(sum);
          if (lane() == 0) logits[row] = sum + (first == 0 ? *weights.bias : static_cast<float>(logits[row]));
        });
      });
    });
    barrier();
    for (int set = thread_index(); set < s_.n_sets; set += Tile::kThreads) {
      const auto at = [&](int row) -> decltype(auto) { return logits[row]; };
      softmax_of_rows(at, starts[set], starts[set + 1]);
    }
    barrier();
    for_each_row(s_.n_sets, [&](int set) {
      const auto share = [&](int row) { return static_cast<float>(logits[row]); };
      gather(set, starts[set], starts[set + 1], share);
    });
    barrier();
  }

  ITM_FAST_DEVICE void write_guided_scores() {
    ITM_FAST_DYNAMIC_SHARED(float, values, Memory::kSquares, kMostQueries);
    for_each_row(s_.n_sets, [&](int set) {
      const float* guidance = of_block(p_.slab.guidance) + set * width_stride_;
      float square = 0.0f, dot = 0.0f;
      for (int i = lane(); i < width_; i += 32) {
        square += guidance[i] * guidance[i];
        dot += guidance[i] * p_.score.weight[i];
      }
      square = add_lanes(square);
      dot = add_lanes(dot);
      if (p_.options.normalize_mean) dot /= sqrtf(square) + static_cast<float>(kNormEpsilon);
      if (lane() == 0) values[set] = dot + *p_.score.bias;
    });
    barrier();
    write_scores([&](int set) {
      const float value = values[set];
      return p_.options.activation == Activation::tanh ? tanhf(value) : 1.0f / (1.0f + expf(-value));
    });
  }

 private:
  // guidance = sum_j share(j) a_j, l2-normalised as the options say; for a warp.
  template <typename Share>
  ITM_FAST_DEVICE void gather(int set, int first_row, int last_row, const Share& share) const {
    const float* aligned = of_block(p_.slab.aligned);
    float* guidance = of_block(p_.slab.guidance) + set * width_stride_;
    for (int i = lane(); i < width_; i += 32) {
      float sum = 0.0f;
      for (int row = first_row; row < last_row; ++row) sum += share(row) * aligned[row * width_stride_ + i];
      guidance[i] = p_.options.residual_aggregation ? (guidance[i] + sum) * 0.5f : sum;
    }
    S* operand = of_block(p_.slab.guidance_operand) + set * width_stride_;
    finish_vector(guidance, operand, p_.options.normalize_guidance);
  }
};

template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void correspond_tile(const RegulationProblem<S>& p, int corresponded, int step) {
  RegulatorSteps<kParts, Tile, S>(p, corresponded).correspond(step);
}
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void aggregate_tile(const RegulationProblem<S>& p, int corresponded, int step) {
  RegulatorSteps<kParts, Tile, S>(p, corresponded).aggregate(step);
}

}  // namespace itm_fast::cuda
