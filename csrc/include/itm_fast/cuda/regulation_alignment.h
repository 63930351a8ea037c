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
        pad_rows(of_block(p_.slab.chunk), n_run_, kChunk, count);
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

  // The squared norm of every row's attended vector, from the Gram matrix of the contexts, right after attend(). Rows
  // whose norm has lost too many digits form the vector, as do those of contexts without a matrix.
  ITM_FAST_DEVICE void find_norms() {
    ITM_FAST_DYNAMIC_SHARED(float, lost, Memory::kDots, kMostQueries);
    if (s_.n_contexts > p_.gram_width) {
      measure();
      return;
    }
    barrier();  // The attention of all rows is written.
    if (s_.n_contexts > kColumns) {
      multiply_by_gram();
    } else if (is_long()) {
      sum_gram([&](int row, int k) { return widen(of_block(p_.slab.attention)[row * p_.columns + k]); });
    } else {
      ITM_FAST_TILE_SCORES(Tile);
      sum_gram([&](int row, int k) { return static_cast<float>(scores[row * kStride + k]); });
    }
    barrier();
    bool any = false;
    for (int row = lane(); row < s_.n_rows; row += 32) any = any || lost[row] != 0.0f;
    if (vote_any(any)) measure_rows([&](int row) { return lost[row] != 0.0f; }, false);
  }

  // The same for all rows from their attended vectors, and the products of these with the queries.
  ITM_FAST_DEVICE void measure() {
    measure_rows([](int) { return true; }, true);
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
        pad_rows(chunk, n_run_, kChunk, size);
        for (int output = 0; output < width_; output += kColumns) {
          const int count = part(output, width_, kColumns);
          multiply_operands<kParts, Tile>(chunk, n_run_, kChunk, layer.packed + output * layer.stride() + first, count,
                                          layer.stride(), size);
          for_each_product_and_number(count, [&](int c) {
            const float bias = layer.bias[output + c];
            float* sums = of_run + output + c;
            return Reader{
                [=, this](int place) { return first == 0 ? bias : sums[place * width_stride_]; },
                [=, this](int place, float product, float before) { sums[place * width_stride_] = product + before; }};
          });
        }
      }
    });
    barrier();
    S* operand = of_block(p_.slab.aligned_operand);
    for_each_row(s_.n_rows,
                 [&](int row) { finish_vector(aligned + row * width_stride_, operand + row * width_stride_, true); });
  }

 private:
  ITM_FAST_DEVICE float* gram() const { return p_.grams + p_.contexts.offset(s_.context) * p_.gram_width; }

  // Norms from the attention at(row, context), a thread per row.
  template <typename At>
  ITM_FAST_DEVICE void sum_gram(const At& at) const {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, lost, Memory::kDots, kMostQueries);
    for (int row = thread_index(); row < s_.n_rows; row += Tile::kThreads) {
      const AttendedNorm norm = attended_norm([&](int k) { return at(row, k); }, gram(), s_.n_contexts);
      squares[row] = norm.square;
      lost[row] = norm.is_lost() ? 1.0f : 0.0f;
    }
  }

  // Norms from the products of the attention with the matrix, for contexts that take several. The scale of a
  // row is in the place of `lost` until all products are added up.
  ITM_FAST_DEVICE void multiply_by_gram() {
    ITM_FAST_TILE_SCORES(Tile);
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, lost, Memory::kDots, kMostQueries);
    using Operand = GramOperand<S>;
    const Operand operand(gram(), s_.n_contexts);
    for_each_run([&] {
      const S* attention = of_block(p_.slab.attention) + run_ * p_.columns;
      for (int first = 0; first < s_.n_contexts; first += kColumns) {
        const int count = part(first, s_.n_contexts, kColumns);
        for (int of_gram = Operand::kParts - 1; of_gram >= 0; --of_gram) {
          multiply_operands<kParts, Tile>(attention, n_run_, p_.columns, operand.rows(first, of_gram), count,
                                          operand.row_stride(), s_.n_contexts);
          const bool is_first = first == 0 && of_gram == Operand::kParts - 1;
          for_each_row_of_run([&](int row, int place) {
            AttendedNorm norm;
            for (int k = lane(); k < count; k += 32) {
              const float e = widen(attention[place * p_.columns + first + k]);
              norm.square += e * scores[place * kStride + k];
              if (of_gram == 0) norm.scale += e * sqrtf(operand.square(first + k));
            }
            norm.square = add_lanes(norm.square);
            norm.scale = add_lanes(norm.scale);
            if (lane() != 0) return;
            squares[row] = is_first ? norm.square : squares[row] + norm.square;
            lost[row] = is_first ? norm.scale : lost[row] + norm.scale;
          });
        }
      }
    });
    barrier();
    for (int row = thread_index(); row < s_.n_rows; row += Tile::kThreads) {
      lost[row] = AttendedNorm{squares[row], lost[row]}.is_lost() ? 1.0f : 0.0f;
    }
  }

  // Norms of the rows for which measures(row) holds, and with `with_products` also their products.
  template <typename Measures>
  ITM_FAST_DEVICE void measure_rows(const Measures& measures, bool with_products) {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(float, dots, Memory::kDots, kMostQueries);
    for_each_run([&] {
      for (int first = 0; first < dim_; first += kColumns) {
        const int count = part(first, dim_, kColumns);
        load_attended(first, count);
        for_each_row_of_run([&](int row, int place) {
          if (!measures(row)) return;
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
            if (with_products) dots[row] = first == 0 ? dot : dots[row] + dot;
          }
        });
      }
    });
    barrier();
  }

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

  // From the raw scores at(row, context), which become the normalised ones, to the attention. That of short sets takes
  // their place, too.
  template <bool kIsLong, typename At>
  ITM_FAST_DEVICE void weigh(const At& at) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    for (int i = thread_index(); i < s_.n_sets * s_.n_contexts; i += Tile::kThreads) {
      const int k = i % s_.n_contexts, set = i / s_.n_contexts;
      const auto of_row = [&](int row) -> decltype(auto) { return at(row, k); };
      normalize_over_queries(of_row, starts[set], starts[set + 1], p_.attention);
    }
    barrier();
    // Sets of half a tile, such as 36 regions, take half of the instructions.
    constexpr int kTile = kColumns / 32, kHalf = (kTile + 1) / 2;
    if (s_.n_contexts <= 32 * kHalf) {
      weigh_rows<kIsLong, kHalf>(at);
    } else if (!kIsLong || s_.n_contexts <= kColumns) {
      weigh_rows<kIsLong, kTile>(at);
    } else {
      weigh_rows<kIsLong, kMostContexts / 32>(at);
    }
    pad_rows(of_block(p_.slab.attention), s_.n_rows, p_.columns, s_.n_contexts);
  }

  // From normalised scores to the attention, with kPerLane contexts per lane.
  template <bool kIsLong, int kPerLane, typename At>
  ITM_FAST_DEVICE void weigh_rows(const At& at) const {
    ITM_FAST_DYNAMIC_SHARED(float, temperatures, Memory::kTemperatures, kMostQueries);
    for_each_row(s_.n_rows, [&](int row) {
      S* attention = of_block(p_.slab.attention) + row * p_.columns;
      const auto of_context = [&](int k) { return static_cast<float>(at(row, k)); };
      const auto store = [&](int k, float weight) {
        S stored;
        narrow(weight, stored);
        attention[k] = stored;
        if constexpr (!kIsLong) at(row, k) = widen(stored);
      };
      const float temperature = corresponded_ > 0 ? static_cast<float>(temperatures[row]) : first_temperature();
      attend_row<kPerLane>(of_context, store, s_.n_contexts, temperature, p_.attention.focal);
    });
  }

  // Fills columns of the chunk of queries that begins with channel `first` with e * q. The factor e is computed from
  // the hidden layers of all correspondences so far, one after the other (Eq 8).
  ITM_FAST_DEVICE void reweight(int first, int block, int count) {
    const bool residual = p_.options.residual_correspondence, learned = p_.options.learned_factors;
    const float* queries = query(run_) + first + block;
    S* reweighted = of_block(p_.slab.chunk) + block;
    if (corresponded_ == 0) {
      for_each_row(n_run_, [&](int place) {
        for (int c = lane(); c < count; c += 32) {
          narrow(queries[place * p_.dim + c] * p_.channels[first + block + c], reweighted[place * kChunk + c]);
        }
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
      const bool is_last = step + 1 == corresponded_, adds_kept = residual && step > 0;
      float* kept = of_block(p_.slab.channels);
      for_each_product_and_number(count, [&](int c) {
        const int channel = first + block + c;
        const float bias = layer.bias[channel];
        const float initial = residual && step == 0 ? (learned ? p_.channels[channel] : 1.0f) : 0.0f;
        return Reader{[=, this](int place) { return is_last ? queries[place * dim_ + c] : 0.0f; },
                      [=](int place, float product, float of_query) {
                        const float before = adds_kept ? kept[place * kColumns + c] : initial;
                        const float sum = tanhf(product + bias) + before;
                        const float e = sum < -1.0f ? -1.0f : sum > 1.0f ? 1.0f : sum;
                        if (is_last) {
                          narrow(of_query * e, reweighted[place * kChunk + c]);
                        } else {
                          kept[place * kColumns + c] = e;
                        }
                      }};
      });
    }
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

  // |q - l2norm(c)|^2 of `count` columns from `first` on, or |q - c|^2.
  ITM_FAST_DEVICE void write_differences(int first, int count, S* differences) const {
    ITM_FAST_DYNAMIC_SHARED(float, squares, Memory::kSquares, kMostQueries);
    constexpr int kRowsTogether = 2, kPerLane = kColumns / 32;
    const float* queries = query(run_) + first;
    for (int first_place = warp(); first_place < n_run_; first_place += kRowsTogether * Tile::kWarps) {
      // All numbers of the queries are read before the first is used, so that their latencies overlap.
      float of_queries[kRowsTogether][kPerLane];
      ITM_FAST_UNROLLED
      for (int i = 0; i < kRowsTogether * kPerLane; ++i) {
        const int place = first_place + i / kPerLane * Tile::kWarps, c = lane() + i % kPerLane * 32;
        of_queries[i / kPerLane][i % kPerLane] = place < n_run_ && c < count ? queries[place * p_.dim + c] : 0.0f;
      }
      ITM_FAST_UNROLLED
      for (int row = 0; row < kRowsTogether; ++row) {
        const int place = first_place + row * Tile::kWarps;
        if (place >= n_run_) continue;
        float scale = 1.0f;
        if (p_.options.normalize_attended) scale /= sqrtf(squares[run_ + place]) + static_cast<float>(kNormEpsilon);
        ITM_FAST_UNROLLED
        for (int i = 0; i < kPerLane; ++i) {
          const int c = lane() + i * 32;
          if (c >= count) continue;
          const float difference = of_queries[row][i] - attended_at(place, c) * scale;
          narrow(difference * difference, differences[place * kChunk + c]);
        }
      }
    }
  }
};

template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void attend_tile(const RegulationProblem<S>& p, int corresponded) {
  RegulatedAttention<kParts, Tile, S>(p, corresponded).attend();
}
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE_APART void find_norms_of_tile(const RegulationProblem<S>& p, int corresponded) {
  RegulatedAttention<kParts, Tile, S>(p, corresponded).find_norms();
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
