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
    const S* contexts = p_.context_operand + p_.contexts.offset(s_.context) * dim_stride_;
    if (corresponded_ == 0 && !p_.options.learned_factors) {
      multiply_operands<kParts, Tile>(p_.query_operand + s_.first_row * dim_stride_, s_.n_rows, dim_stride_, contexts,
                                      s_.n_contexts, dim_stride_, dim_);
    } else {
      for (int first = 0; first < dim_; first += kChunk) {
        const int count = part(first, dim_, kChunk);
        for (int block = 0; block < count; block += kColumns) reweight(first, block, part(block, count, kColumns));
        multiply_operands<kParts, Tile>(of_block(p_.slab.chunk), s_.n_rows, kChunk, contexts + first, s_.n_contexts,
                                        dim_stride_, count);
        if (dim_ > kChunk) add_chunk(first);
      }
    }
    ITM_FAST_TILE_SCORES(Tile);
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(float, temperatures, Memory::kTemperatures, Tile::kRows);
    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts; i += Tile::kThreads) {
      const int k = i % s_.n_contexts, set = i / s_.n_contexts;
      const auto at = [&](int row) -> decltype(auto) { return scores[row * kStride + k]; };
      normalize_over_queries(at, starts[set], starts[set + 1], p_.attention);
    }
    barrier();
    for_each_row(s_.n_rows, [&](int row) {
      S* attention = of_block(p_.slab.attention) + row * kColumns;
      const auto at = [&](int k) { return static_cast<float>(scores[row * kStride + k]); };
      const auto store = [&](int k, float weight) { narrow(weight, attention[k]); };
      const float temperature = corresponded_ > 0 ? static_cast<float>(temperatures[row]) : first_temperature();
      attend_row<kColumns / 32>(at, store, s_.n_contexts, temperature, p_.attention.focal);
    });
  }

  // The squared norm of every row's attended vector, and its product with the query.
  ITM_FAST_DEVICE void measure() {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, Tile::kRows);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, Tile::kRows);
    for (int first = 0; first < dim_; first += kColumns) {
      const int count = part(first, dim_, kColumns);
      load_attended(first, count);
      for_each_row(s_.n_rows, [&](int row) {
        const float* of_row = query(row) + first;
        float square = 0.0f, dot = 0.0f;
        for (int c = lane(); c < count; c += 32) {
          const float attended = attended_at(row, c);
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
    barrier();
  }

  // Eq 7.
  ITM_FAST_DEVICE void align_rows(const LayerOperand<S>& layer) {
    float* aligned = of_block(p_.slab.aligned);
    S* chunk = of_block(p_.slab.chunk);
    for (int first = 0; first < dim_; first += kChunk) {
      const int size = part(first, dim_, kChunk);
      for (int block = 0; block < size; block += kColumns) {
        const int count = part(block, size, kColumns);
        load_attended(first + block, count);
        write_differences(first + block, count, chunk + block);
      }
      for (int output = 0; output < width_; output += kColumns) {
        const int count = part(output, width_, kColumns);
        multiply_operands<kParts, Tile>(chunk, s_.n_rows, kChunk, layer.packed + output * layer.stride() + first, count,
                                        layer.stride(), size);
        for_each_product(s_.n_rows, count, [&](int row, int c, float product) {
          float* sum = aligned + row * width_stride_ + output + c;
          *sum = product + (first == 0 ? layer.bias[output + c] : *sum);
        });
      }
    }
    barrier();
    S* operand = of_block(p_.slab.aligned_operand);
    for_each_row(s_.n_rows, [&](int row) { make_unit(aligned + row * width_stride_, operand + row * width_stride_); });
  }

 private:
  // Adds the raw scores of the previous chunks, and keeps the sums if more chunks follow.
  ITM_FAST_DEVICE void add_chunk(int first) {
    ITM_FAST_TILE_SCORES(Tile);
    const bool is_last = first + kChunk >= dim_;
    for_each_row(s_.n_rows, [&](int row) {
      float* logits = of_block(p_.slab.logits) + row * kColumns;
      for (int k = lane(); k < s_.n_contexts; k += 32) {
        const float sum = first == 0 ? static_cast<float>(scores[row * kStride + k])
                                     : logits[k] + static_cast<float>(scores[row * kStride + k]);
        if (is_last) scores[row * kStride + k] = sum;
        if (!is_last) logits[k] = sum;
      }
    });
    barrier();
  }

  // Fills columns of the chunk of queries that begins with channel `first` with e * q. The factor e is computed from
  // the hidden layers of all correspondences so far, one after the other (Eq 8).
  ITM_FAST_DEVICE void reweight(int first, int block, int count) {
    const bool residual = p_.options.residual_correspondence;
    if (corresponded_ == 0) {
      for_each_row(s_.n_rows, [&](int row) {
        for (int c = lane(); c < count; c += 32) reweight_one(row, block + c, first, p_.channels[first + block + c]);
      });
      return;
    }
    // Without a residual, only the last one counts.
    for (int step = residual ? 0 : corresponded_ - 1; step < corresponded_; ++step) {
      const LayerOperand<S>& layer = p_.correspondence(step, 1);
      multiply_operands<kParts, Tile>(hidden_of(step), s_.n_rows, operand_stride(p_.hidden),
                                      layer.packed + (first + block) * layer.stride(), count, layer.stride(),
                                      layer.inputs);
      for_each_product(s_.n_rows, count, [&](int row, int c, float product) {
        float* kept = of_block(p_.slab.channels) + row * kColumns + c;
        const int channel = first + block + c;
        float e = tanhf(product + layer.bias[channel]);
        if (residual && step > 0) e += *kept;
        if (residual && step == 0) e += p_.options.learned_factors ? p_.channels[channel] : 1.0f;
        e = e < -1.0f ? -1.0f : e > 1.0f ? 1.0f : e;
        if (step + 1 < corresponded_) *kept = e;
        if (step + 1 == corresponded_) reweight_one(row, block + c, first, e);
      });
    }
  }
  ITM_FAST_DEVICE void reweight_one(int row, int column, int first, float channel) const {
    narrow(query(row)[first + column] * channel, of_block(p_.slab.chunk)[row * kChunk + column]);
  }

  // Prepares `count` columns of every row's attended vector, from `first` on, for attended_at.
  ITM_FAST_DEVICE void load_attended(int first, int count) const {
    if (s_.n_contexts == 0) return;
    const int64_t stride = operand_stride(s_.n_contexts);
    multiply_operands<kParts, Tile>(of_block(p_.slab.attention), s_.n_rows, kColumns,
                                    p_.transposed + p_.transposed_start(s_.context) * p_.dim + first * stride, count,
                                    stride, s_.n_contexts);
  }
  ITM_FAST_DEVICE float attended_at(int row, int c) const {
    ITM_FAST_TILE_SCORES(Tile);
    return s_.n_contexts > 0 ? static_cast<float>(scores[row * kStride + c]) : 0.0f;
  }

  // |q - l2norm(c)|^2 of `count` columns from `first` on.
  ITM_FAST_DEVICE void write_differences(int first, int count, S* differences) const {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, Tile::kRows);
    for_each_row(s_.n_rows, [&](int row) {
      const float scale = 1.0f / (sqrtf(squares[row]) + static_cast<float>(kNormEpsilon));
      const float* of_row = query(row) + first;
      for (int c = lane(); c < count; c += 32) {
        const float difference = of_row[c] - attended_at(row, c) * scale;
        narrow(difference * difference, differences[row * kChunk + c]);
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
