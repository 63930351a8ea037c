// One tile of the backward of regulated cross-attention on a GPU: the code that its steps share.
//
// Data between two products is in the chunk's arrays. As in the forward, a warp takes a row and a lane every 32nd
// column, steps are separate functions, and all products run on tensor cores in float32.
#pragma once

#include "itm_fast/cuda/regulation_attention.h"
#include "itm_fast/cuda/regulation_backward_lists.h"
#include "itm_fast/cuda/regulation_dropout.h"
#include "itm_fast/cuda/regulation_tile.h"

namespace itm_fast::cuda {

// The parts of float32 numbers in products: all digits.
inline constexpr int kBackwardParts = 3;

// The shared memory of a block: the products, or the sums of rows, then the remaining arrays.
template <typename Tile>
struct BackwardMemory {
  static constexpr int kProducts = Tile::kProductBytes > RowSumTile::kBytes ? Tile::kProductBytes : RowSumTile::kBytes;
  static constexpr int kQueryRows = (kProducts + 15) / 16 * 16;
  static constexpr int kState = kQueryRows + kMostQueries * 8, kStateCount = 6;
  static constexpr int kStarts = kState + kStateCount * 8, kStartCount = kTileSets + 4;
  static constexpr int kRowSets = kStarts + kStartCount * 4;
  static constexpr int kBytes = kRowSets + kMostQueries * 4;
};

// The tile that a block works on. Kept in shared memory, where each step finds it.
struct BackwardState {
  int64_t context, row, first_entry;  // its first row in the chunk, and its first entry in the list of its context set
  int n_sets, n_rows, n_contexts;
};

template <typename Tile>
class BackwardStep {
 protected:
  using Memory = BackwardMemory<Tile>;
  static constexpr int kColumns = Tile::kColumns, kStride = Tile::kScoreStride;

 public:
  ITM_FAST_DEVICE explicit BackwardStep(const RegulationBackward& problem)
      : b_(problem),
        p_(problem.forward),
        a_(problem.arrays),
        s_(state()),
        dim_(static_cast<int>(p_.dim)),
        width_(static_cast<int>(p_.width)) {}

  // Opens a tile of the chunk.
  ITM_FAST_DEVICE static void open(const RegulationBackward& p, const ListedTile& tile, int64_t row) {
    ITM_FAST_DYNAMIC_SHARED(int64_t, query_rows, Memory::kQueryRows, kMostQueries);
    ITM_FAST_DYNAMIC_SHARED(int64_t, kept, Memory::kState, Memory::kStateCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, kMostQueries);
    barrier();  // The tile before is done.
    const int64_t line = tile.context * p.forward.queries.n_sets;
    const int64_t before = tile.row - p.lists.first_row[tile.context];
    for (int set = thread_index(); set < tile.n_sets; set += Tile::kThreads) {
      const int64_t query = p.lists.queries[line + tile.first_entry + set];
      const int start = static_cast<int>(p.lists.rows[line + query] - before);
      const int length = static_cast<int>(p.forward.queries.length(query));
      const int64_t first = p.forward.queries.offset(query);
      starts[set] = start;
      if (set + 1 == tile.n_sets) starts[set + 1] = start + length;
      for (int j = 0; j < length; ++j) {
        row_sets[start + j] = set;
        query_rows[start + j] = first + j;
      }
    }
    if (thread_index() == 0) {
      kept[0] = tile.context;
      kept[1] = row;
      kept[2] = tile.first_entry;
      kept[3] = tile.n_sets;
      kept[4] = tile.n_rows;
      kept[5] = p.forward.contexts.length(tile.context);
    }
    barrier();
  }

 protected:
  ITM_FAST_DEVICE static BackwardState state() {
    ITM_FAST_DYNAMIC_SHARED(int64_t, kept, Memory::kState, Memory::kStateCount);
    return {kept[0], kept[1], kept[2], static_cast<int>(kept[3]), static_cast<int>(kept[4]), static_cast<int>(kept[5])};
  }

  // The tile's rows of an array; its matrix in a turned one.
  ITM_FAST_DEVICE float* of(const StepArray& array, int64_t step = 0) const { return array.at(step, s_.row); }
  // A row of the tile, or a pair.
  ITM_FAST_DEVICE float* of_row(const StepArray& array, int row, int64_t step = 0) const {
    return array.at(step, s_.row + row);
  }

  ITM_FAST_DEVICE int64_t query_row(int row) const {
    ITM_FAST_DYNAMIC_SHARED(int64_t, query_rows, Memory::kQueryRows, kMostQueries);
    return query_rows[row];
  }
  ITM_FAST_DEVICE int set_of(int row) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, kMostQueries);
    return row_sets[row];
  }
  // The first row of a set; that of the next set is past its last.
  ITM_FAST_DEVICE int start_of(int set) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    return starts[set];
  }
  ITM_FAST_DEVICE int rows_of(int set) const { return start_of(set + 1) - start_of(set); }

  // The gradient of a set's score.
  ITM_FAST_DEVICE float gradient_of(int set) const {
    const int64_t query = b_.lists.queries[s_.context * p_.queries.n_sets + s_.first_entry + set];
    return b_.gradients[query * p_.contexts.n_sets + s_.context];
  }

  // Calls body(row) for the rows of each warp.
  template <typename Body>
  ITM_FAST_DEVICE static void for_each_row(int n_rows, const Body& body) {
    for (int row = warp(); row < n_rows; row += Tile::kWarps) body(row);
  }
  // Calls body(row, column). Lanes take the same columns in every function of this class.
  template <typename Body>
  ITM_FAST_DEVICE static void for_each_number(int n_rows, int n_columns, const Body& body) {
    for_each_row(n_rows, [&](int row) {
      for (int c = lane(); c < n_columns; c += 32) body(row, c);
    });
  }
  // Calls use(column, load(column)) for the lane's columns, see load_ahead.
  template <typename Load, typename Use>
  ITM_FAST_DEVICE static void for_each_column(int n_columns, const Load& load, const Use& use) {
    const auto column = [](int i) { return lane() + 32 * i; };
    load_ahead(
        0, (n_columns - lane() + 31) / 32, [&](int i) { return load(column(i)); },
        [&](int i, const auto& loaded) { use(column(i), loaded); });
  }
  // for_each_number for code that reads what it may also write: calls use(row, column, load(row, column)).
  template <typename Load, typename Use>
  ITM_FAST_DEVICE static void for_each_number(int n_rows, int n_columns, const Load& load, const Use& use) {
    for_each_row(n_rows, [&](int row) {
      for_each_column(
          n_columns, [&](int c) { return load(row, c); }, [&](int c, const auto& loaded) { use(row, c, loaded); });
    });
  }
  // Sums value(i) for i below `count`; for a warp.
  template <typename Value>
  ITM_FAST_DEVICE static float sum_of(int count, const Value& value) {
    float sum = 0.0f;
    for (int i = lane(); i < count; i += 32) sum += value(i);
    return add_lanes(sum);
  }
  ITM_FAST_DEVICE static float dot_of(const float* a, const float* b, int count) {
    return sum_of(count, [&](int i) { return a[i] * b[i]; });
  }

  // Rows times columns, both of any number and of length `depth`: calls body(row, column, product), or with `load` also
  // with load(row, column). Ends with a barrier.
  template <typename Body>
  ITM_FAST_DEVICE static void multiply(const float* rows, int n_rows, int64_t row_stride, const float* columns,
                                       int n_columns, int64_t column_stride, int depth, const Body& body) {
    multiply(
        rows, n_rows, row_stride, columns, n_columns, column_stride, depth, [](int, int) { return 0; },
        [&](int row, int c, float product, int) { body(row, c, product); });
  }
  template <typename Load, typename Body>
  ITM_FAST_DEVICE static void multiply(const float* rows, int n_rows, int64_t row_stride, const float* columns,
                                       int n_columns, int64_t column_stride, int depth, const Load& load,
                                       const Body& body) {
    ITM_FAST_TILE_SCORES(Tile);
    for (int first = 0; first < n_columns; first += kColumns) {
      const int count = n_columns - first < kColumns ? n_columns - first : kColumns;
      for (int run = 0; run < n_rows; run += Tile::kRows) {
        const int n_run = n_rows - run < Tile::kRows ? n_rows - run : Tile::kRows;
        multiply_operands<kBackwardParts, Tile>(rows + run * row_stride, n_run, row_stride,
                                                columns + first * column_stride, count, column_stride, depth);
        for_each_number(
            n_run, count, [&](int row, int c) { return load(run + row, first + c); },
            [&](int row, int c, const auto& loaded) {
              body(run + row, first + c, static_cast<float>(scores[row * kStride + c]), loaded);
            });
      }
    }
    barrier();
  }
  // Calls body(row, output, sum) with the sums of a layer.
  template <typename Body>
  ITM_FAST_DEVICE void apply_layer(const StepArray& rows, int64_t step, int n_rows, const LayerOperand<float>& layer,
                                   const Body& body) const {
    multiply(of(rows, step), n_rows, rows.width, layer.packed, layer.outputs, layer.stride(), layer.inputs,
             [&](int row, int c, float product) { body(row, c, product + layer.bias[c]); });
  }
  // Calls body(row, input, gradient), given the gradients of the layer's sums.
  template <typename Body>
  ITM_FAST_DEVICE void apply_transposed(const StepArray& rows, int64_t step, int n_rows,
                                        const LayerOperand<float>& layer, const Body& body) const {
    const int64_t stride = operand_stride(layer.outputs);
    multiply(of(rows, step), n_rows, rows.width, b_.turned_layers[&layer - p_.layers], layer.inputs, stride,
             layer.outputs, body);
  }
  // Adds these gradients to rows of `sums`.
  ITM_FAST_DEVICE void add_transposed(const StepArray& rows, int64_t step, int n_rows, const LayerOperand<float>& layer,
                                      const StepArray& sums) const {
    const int64_t stride = operand_stride(layer.outputs);
    multiply(
        of(rows, step), n_rows, rows.width, b_.turned_layers[&layer - p_.layers], layer.inputs, stride, layer.outputs,
        [&](int row, int i) { return of_row(sums, row)[i]; },
        [&](int row, int i, float product, float sum) { of_row(sums, row)[i] = sum + product; });
  }
  // Stores rows as a matrix (columns, padded rows) of a turned array.
  ITM_FAST_DEVICE void turn(const StepArray& rows, int64_t step, int n_rows, int n_columns, const StepArray& turned,
                            int64_t turned_step) const {
    const float* source = of(rows, step);
    float* target = of(turned, turned_step);
    const int stride = static_cast<int>(padded(n_rows));
    for_each_number(
        n_rows, n_columns, [&](int row, int c) { return source[row * rows.width + c]; },
        [&](int row, int c, float number) { target[static_cast<int64_t>(c) * stride + row] = number; });
  }

  // The attention before correspondence `step`, or after the last one, among those that run.
  ITM_FAST_DEVICE int64_t attention_of(int step) const {
    return step < p_.options.n_alignments ? step : p_.options.n_alignments;
  }
  // Whether this attention has channel factors for each row, from RCR, or the same for all rows, learned.
  ITM_FAST_DEVICE bool has_row_factors(int step) const { return step > 0 && p_.options.n_correspondences > 0; }
  ITM_FAST_DEVICE bool has_channels(int step) const { return has_row_factors(step) || p_.options.learned_factors; }
  ITM_FAST_DEVICE float channel_of(int step, int row, int d) const {
    return has_row_factors(step) ? of_row(a_.channels, row, step - 1)[d] : p_.channels[d];
  }
  ITM_FAST_DEVICE float temperature_of(int step, int row) const {
    if (has_row_factors(step)) return *of_row(a_.temperatures, row, step - 1);
    return p_.options.learned_factors ? *p_.temperature : p_.attention.temperature;
  }
  // The channel factor after a correspondence, before it is bounded.
  ITM_FAST_DEVICE float changed_channel(int step, int row, int d, float change) const {
    if (!p_.options.residual_correspondence) return change;
    return change + (has_channels(step) ? channel_of(step, row, d) : 1.0f);
  }
  // What an attended vector of this norm is multiplied with in Eq 7.
  ITM_FAST_DEVICE float attended_scale(float norm) const {
    return p_.options.normalize_attended ? 1.0f / (norm + static_cast<float>(kNormEpsilon)) : 1.0f;
  }
  // What RCR sees.
  ITM_FAST_DEVICE const StepArray& seen() const { return p_.options.sees_query ? a_.queries : a_.aligned; }
  ITM_FAST_DEVICE int64_t seen_step(int step) const { return p_.options.sees_query ? 0 : step; }

  // The raw scores of a row, normalised over the rows of its set, until their gradients are turned.
  ITM_FAST_DEVICE float* normalized(int row, int64_t attention) const {
    return of_row(a_.turned_scores, row, attention);
  }
  // weighted = v * drop(tanh(A g + alpha)). Ends with a barrier.
  ITM_FAST_DEVICE void weigh_guides(int step) const {
    const ChannelDropout dropout(p_.options.dropout, p_.seed);
    for_each_row(s_.n_sets, [&](int set) {
      const float* guide = of_row(a_.guide, set, step);
      float* weighted = of_row(a_.weighted, set);
      dropout.for_each_channel(guide_place(set, step), 0, width_, [&](int c, float factor) {
        weighted[c] = guide[c] * p_.attentiveness[step].weight[c] * factor;
      });
    });
    barrier();
  }
  ITM_FAST_DEVICE DropoutPlace guide_place(int set, int step) const {
    return {query_row(start_of(set)), s_.context, 2 * step + 1};
  }
  ITM_FAST_DEVICE DropoutPlace local_place(int row, int step) const { return {query_row(row), s_.context, 2 * step}; }

  // sum_j w_j a_j of a set, or its mean with the guidance; for a lane's channels.
  ITM_FAST_DEVICE float gather(int set, int step, int64_t aligned_step, int i) const {
    float sum = 0.0f;
    for (int row = start_of(set); row < start_of(set + 1); ++row) {
      sum += *of_row(a_.logits, row, step) * of_row(a_.aligned, row, aligned_step)[i];
    }
    return p_.options.residual_aggregation ? (of_row(a_.guidance, set, step)[i] + sum) * 0.5f : sum;
  }

  const RegulationBackward& b_;
  const RegulationProblem<float>& p_;
  const BackwardArrays& a_;
  const BackwardState s_;
  const int dim_, width_;
};

// Names that a class template derived from BackwardStep uses.
#define ITM_FAST_BACKWARD_STEP                                                                                        \
  using Step = BackwardStep<Tile>;                                                                                    \
  using typename Step::Memory;                                                                                        \
  using Step::b_, Step::p_, Step::a_, Step::s_, Step::dim_, Step::width_;                                             \
  using Step::of, Step::of_row, Step::query_row, Step::set_of, Step::start_of, Step::rows_of, Step::gradient_of;      \
  using Step::for_each_row, Step::for_each_column, Step::for_each_number, Step::sum_of, Step::dot_of, Step::multiply, \
      Step::apply_layer;                                                                                              \
  using Step::apply_transposed, Step::add_transposed, Step::turn, Step::attention_of, Step::has_channels,             \
      Step::channel_of;                                                                                               \
  using Step::temperature_of, Step::changed_channel, Step::attended_scale, Step::seen, Step::seen_step;               \
  using Step::normalized, Step::weigh_guides, Step::guide_place, Step::local_place, Step::gather;                     \
                                                                                                                      \
 public:                                                                                                              \
  using Step::Step

}  // namespace itm_fast::cuda
