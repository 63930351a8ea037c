// The attention and the alignments of a tile of regulated cross-attention on a GPU.
//
// Everything of width d is processed in chunks. Attended vectors are products of the attention with a chunk of the
// transposed contexts; they become squared differences, which are multiplied with the alignment's weight at once. With
// RCR, the channels for a chunk of queries are computed from its hidden layers just before the product with the
// contexts.
#pragma once

#include "itm_fast/cuda/regulation_tile.h"

namespace itm_fast::cuda {

template <int kParts, typename Tile, typename S>
class RegulatedAttention : private RegulationStep<kParts, Tile, S> {
  ITM_FAST_REGULATION_STEP;

  // Writes the attention of every row to the slab, with the current factors.
  ITM_FAST_DEVICE void attend() {
    if (s_.n_contexts == 0) return;
    for_each_run([&] {
      if (corresponded_ == 0 && !p_.options.learned_factors) {
        multiply_contexts(p_.query_operand + (s_.first_row + run_) * dim_stride_, dim_stride_, 0, dim_);
        return;
      }
      for (int first = 0; first < dim_; first += kChunk) {
        const int count = part(first, dim_, kChunk);
        for (int block = 0; block < count; block += kColumns) reweight(first, block, part(block, count, kColumns));
        multiply_contexts(of_block(p_.slab.chunk), kChunk, first, count);
      }
    });
    if (is_long()) {
      weigh<true>([&](int row, int k) -> float& { return logits(row)[k]; });
    } else {
      ITM_FAST_TILE_SCORES(Tile);
      weigh<false>([&](int row, int k) -> decltype(auto) { return scores[row * kStride + k]; });
    }
  }

  // The squared norm of every row's attended vector, and its product with the query.
  ITM_FAST_DEVICE void measure() {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, kMostQueries);
    for_each_run([&] {
      for (int first = 0; first < dim_; first += kColumns) {
        const int count = part(first, dim_, kColumns);
        load_attended(first, count);
        for_each_row_of_run([&](int row, int place) {
          const float* of_row = query(row) + first;
          float square = 0.0f, dot = 0.0f;
          for (int c = lane(); c < count; c += 32) {
            const float attended = attended_at(place, c);
            square += attended * attended;
            dot += attended * of_row[c];
          }
          square = add_lanes(square);
          dot = add_lanes(dot);
          if (lane() == 0) {
            squares[row] = first == 0 ? square : squares[row] + square;
            dots[row] = first == 0 ? dot : dots[row] + dot;
          }
        });
      }
    });
    barrier();
  }

  // Eq 7.
  ITM_FAST_DEVICE void align_rows(const LayerOperand<S>& layer) {
    float* aligned = of_block(p_.slab.aligned);
    S* chunk = of_block(p_.slab.chunk);
    for_each_run([&] {
      float* of_run = aligned + run_ * width_stride_;
      for (int first = 0; first < dim_; first += kChunk) {
        const int size = part(first, dim_, kChunk);
        for (int block = 0; block < size; block += kColumns) {
          const int count = part(block, size, kColumns);
          load_attended(first + block, count);
          write_differences(first + block, count, chunk + block);
        }
        for (int output = 0; output < width_; output += kColumns) {
          const int count = part(output, width_, kColumns);
          multiply_operands<kParts, Tile>(chunk, n_run_, kChunk, layer.packed + output * layer.stride() + first, count,
                                          layer.stride(), size);
          for_each_product(count, [&](int place, int c, float product) {
            float* sum = of_run + place * width_stride_ + output + c;
            *sum = product + (first == 0 ? layer.bias[output + c] : *sum);
          });
        }
      }
    });
    barrier();
    S* operand = of_block(p_.slab.aligned_operand);
    for_each_row(s_.n_rows, [&](int row) { make_unit(aligned + row * width_stride_, operand + row * width_stride_); });
  }

 private:
  // Whether the raw scores take several products. They are then in the slab.
  ITM_FAST_DEVICE bool is_long() const { return s_.n_rows > Tile::kRows || s_.n_contexts > kColumns; }
  ITM_FAST_DEVICE float* logits(int row) const { return of_block(p_.slab.logits) + row * p_.columns; }

  // Multiplies `count` channels from `first` on, of a run's rows and of all contexts.
  ITM_FAST_DEVICE void multiply_contexts(const S* rows, int64_t stride, int first, int count) const {
    const S* contexts = p_.context_operand + p_.contexts.offset(s_.context) * dim_stride_ + first;
    for (int context = 0; context < s_.n_contexts; context += kColumns) {
      const int n = part(context, s_.n_contexts, kColumns);
      multiply_operands<kParts, Tile>(rows, n_run_, stride, contexts + context * dim_stride_, n, dim_stride_, count);
      if (count < dim_ || is_long()) add_chunk(first, first + count == dim_, context, n);
    }
  }

  // Adds the raw scores of the previous chunks to those of a piece of contexts. Keeps the sums in the slab if more
  // chunks follow, or if the sets are long.
  ITM_FAST_DEVICE void add_chunk(int first, bool is_last, int context, int count) const {
    ITM_FAST_TILE_SCORES(Tile);
    for_each_row_of_run([&](int row, int place) {
      float* sums = logits(row) + context;
      for (int k = lane(); k < count; k += 32) {
        const float product = scores[place * kStride + k], sum = first == 0 ? product : sums[k] + product;
        if (is_last && !is_long()) {
          scores[place * kStride + k] = sum;
        } else {
          sums[k] = sum;
        }
      }
    });
    barrier();
  }

  // From the raw scores at(row, context), which become the normalised ones, to the attention.
  template <bool kMayBeLong, typename At>
  ITM_FAST_DEVICE void weigh(const At& at) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(float, temperatures, Memory::kTemperatures, kMostQueries);
    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts; i += Tile::kThreads) {
      const int k = i % s_.n_contexts, set = i / s_.n_contexts;
      const auto of_row = [&](int row) -> decltype(auto) { return at(row, k); };
      normalize_over_queries(of_row, starts[set], starts[set + 1], p_.attention);
    }
    barrier();
    for_each_row(s_.n_rows, [&](int row) {
      S* attention = of_block(p_.slab.attention) + row * p_.columns;
      const auto of_context = [&](int k) { return static_cast<float>(at(row, k)); };
      const auto store = [&](int k, float weight) { narrow(weight, attention[k]); };
      const float temperature = corresponded_ > 0 ? static_cast<float>(temperatures[row]) : first_temperature();
      attend_contexts<Tile, kMayBeLong>(of_context, store, s_.n_contexts, temperature, p_.attention.focal);
    });
  }

  // Fills columns of the chunk of queries that begins with channel `first` with e * q. The factor e is computed from
  // the hidden layers of all correspondences so far, one after the other (Eq 8).
  ITM_FAST_DEVICE void reweight(int first, int block, int count) {
    const bool residual = p_.options.residual_correspondence;
    if (corresponded_ == 0) {
      for_each_row(n_run_, [&](int place) {
        for (int c = lane(); c < count; c += 32) reweight_one(place, block + c, first, p_.channels[first + block + c]);
      });
      return;
    }
    // Without a residual, only the last one counts.
    for (int step = residual ? 0 : corresponded_ - 1; step < corresponded_; ++step) {
      const LayerOperand<S>& layer = p_.correspondence(step, 1);
      const int64_t stride = operand_stride(p_.hidden);
      multiply_operands<kParts, Tile>(hidden_of(step) + run_ * stride, n_run_, stride,
                                      layer.packed + (first + block) * layer.stride(), count, layer.stride(),
                                      layer.inputs);
      for_each_product(count, [&](int place, int c, float product) {
        float* kept = of_block(p_.slab.channels) + place * kColumns + c;
        const int channel = first + block + c;
        float e = tanhf(product + layer.bias[channel]);
        if (residual && step > 0) e += *kept;
        if (residual && step == 0) e += p_.options.learned_factors ? p_.channels[channel] : 1.0f;
        e = e < -1.0f ? -1.0f : e > 1.0f ? 1.0f : e;
        if (step + 1 < corresponded_) *kept = e;
        if (step + 1 == corresponded_) reweight_one(place, block + c, first, e);
      });
    }
  }
  ITM_FAST_DEVICE void reweight_one(int place, int column, int first, float channel) const {
    narrow(query(run_ + place)[first + column] * channel, of_block(p_.slab.chunk)[place * kChunk + column]);
  }

  // Prepares `count` columns of the attended vectors of a run, from `first` on, for attended_at.
  ITM_FAST_DEVICE void load_attended(int first, int count) const {
    if (s_.n_contexts == 0) return;
    const int64_t stride = operand_stride(s_.n_contexts);
    multiply_operands<kParts, Tile>(of_block(p_.slab.attention) + run_ * p_.columns, n_run_, p_.columns,
                                    p_.transposed + p_.transposed_start(s_.context) * p_.dim + first * stride, count,
                                    stride, s_.n_contexts);
  }
  ITM_FAST_DEVICE float attended_at(int place, int c) const {
    ITM_FAST_TILE_SCORES(Tile);
    return s_.n_contexts > 0 ? static_cast<float>(scores[place * kStride + c]) : 0.0f;
  }

  // |q - l2norm(c)|^2 of `count` columns from `first` on.
  ITM_FAST_DEVICE void write_differences(int first, int count, S* differences) const {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    for_each_row_of_run([&](int row, int place) {
      const float scale = 1.0f / (sqrtf(squares[row]) + static_cast<float>(kNormEpsilon));
      const float* of_row = query(row) + first;
      for (int c = lane(); c < count; c += 32) {
        const float difference = of_row[c] - attended_at(place, c) * scale;
        narrow(difference * difference, differences[place * kChunk + c]);
      }
    });
  }
};

template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void attend_tile(const RegulationProblem<S>& p, int corresponded) {
  RegulatedAttention<kParts, Tile, S>(p, corresponded).attend();
}
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void measure_tile(const RegulationProblem<S>& p, int corresponded) {
  RegulatedAttention<kParts, Tile, S>(p, corresponded).measure();
}
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void align_tile(const RegulationProblem<S>& p, int corresponded, int step) {
  RegulatedAttention<kParts, Tile, S>(p, corresponded).align_rows(p.alignment(step));
}

}  // namespace itm_fast::cuda
