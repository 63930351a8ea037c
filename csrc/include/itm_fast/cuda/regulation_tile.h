// One tile of regulated cross-attention on a GPU: the code that its steps share.
//
// A tile is a run of whole query sets with one context set, with one row for each query row. A warp takes a row, and a
// lane every 32nd column, so sums over a row have a fixed order. Results of a product in shared memory are copied to
// the block's slab. A query set that is longer than a product is a tile by itself, and is multiplied in runs of rows.
#pragma once

#include "itm_fast/cuda/regulation_attention.h"
#include "itm_fast/cuda/regulation_problem.h"

namespace itm_fast::cuda {

// The shared memory of a block: the products, then the remaining arrays. A Tile is a ProductTile with kChunk, the
// columns of a chunk: products that continue from chunk to chunk read and write their sums once per chunk.
template <typename Tile>
struct RegulationMemory {
  static constexpr int kStarts = Tile::kProductBytes, kStartCount = kTileSets + 4;
  static constexpr int kRowSets = kStarts + kStartCount * 4;
  static constexpr int kTemperatures = kRowSets + kMostQueries * 4;
  static constexpr int kSquares = kTemperatures + kMostQueries * 4;
  static constexpr int kDots = kSquares + kMostQueries * 4;
  static constexpr int kState = kDots + kMostQueries * 4, kStateCount = 6;
  static constexpr int kBytes = kState + kStateCount * 8;
};

// Rows times columns, stored in ITM_FAST_TILE_SCORES. A separate function, so that it does not share its callers'
// registers and a kernel holds one copy of it. Rows of the forward are padded with zeros to whole copies. Products of
// several parts do not profit: with whole copies the kernel spills.
template <int kParts, typename Tile, Copies kCopies = kParts == 1 ? Copies::whole_parts : Copies::parts, typename S>
ITM_FAST_DEVICE_APART void multiply_operands(const S* rows, int n_rows, int64_t row_stride, const S* columns,
                                             int n_columns, int64_t column_stride, int depth) {
  barrier();  // The operands have been written, and what lies in the products' shared memory has been read.
  multiply_tile<kParts, Tile, kParts >= 2, kCopies>(RowRun<S>{rows, n_rows, row_stride},
                                                    RowRun<S>{columns, n_columns, column_stride}, depth, true);
}

// The sets of a tile. Kept in shared memory, where each step finds it.
struct RegulationState {
  int64_t first_set, first_row, context;
  int n_sets, n_rows, n_contexts;
};

template <typename Tile>
ITM_FAST_DEVICE RegulationState state_of_tile() {
  ITM_FAST_DYNAMIC_SHARED(int64_t, state, RegulationMemory<Tile>::kState, RegulationMemory<Tile>::kStateCount);
  return {
      state[0], state[1], state[2], static_cast<int>(state[3]), static_cast<int>(state[4]), static_cast<int>(state[5])};
}

// Two functions of a column of a product: read(row of the run) and use(row of the run, product, what was read).
template <typename Read, typename Use>
struct Reader {
  Read read;
  Use use;
};
template <typename Read, typename Use>
Reader(Read, Use) -> Reader<Read, Use>;

// A step of a tile. Steps are separate functions (ITM_FAST_DEVICE_APART), so that they do not share registers.
template <int kParts, typename Tile, typename S>
class RegulationStep {
 protected:
  using Memory = RegulationMemory<Tile>;
  static constexpr int kColumns = Tile::kColumns, kChunk = Tile::kChunk, kStride = Tile::kScoreStride;
  static_assert(Tile::kRows >= kTileSets);  // Guidance vectors are rows of products.

 public:
  // `corresponded`: correspondences that the tile has finished.
  ITM_FAST_DEVICE RegulationStep(const RegulationProblem<S>& problem, int corresponded)
      : p_(problem),
        s_(state_of_tile<Tile>()),
        corresponded_(corresponded),
        dim_(static_cast<int>(problem.dim)),
        width_(static_cast<int>(problem.width)),
        dim_stride_(operand_stride(problem.dim)),
        width_stride_(operand_stride(problem.width)),
        slab_(block_index() * problem.slab.bytes) {}

 protected:
  template <typename T>
  ITM_FAST_DEVICE T* of_block(T* first) const {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(first) + slab_);
  }
  ITM_FAST_DEVICE static int part(int first, int size, int most) { return size - first < most ? size - first : most; }
  ITM_FAST_DEVICE const float* query(int row) const { return p_.queries.values + (s_.first_row + row) * p_.dim; }

  // Calls body(row) for the rows of each warp.
  template <typename Body>
  ITM_FAST_DEVICE static void for_each_row(int n_rows, const Body& body) {
    for (int row = warp(); row < n_rows; row += Tile::kWarps) body(row);
  }
  // Calls body() for each run of n_run_ rows from row run_ on. The next two functions take its rows.
  template <typename Body>
  ITM_FAST_DEVICE void for_each_run(const Body& body) {
    for (run_ = 0; run_ < s_.n_rows; run_ += Tile::kRows) {
      n_run_ = part(run_, s_.n_rows, Tile::kRows);
      body();
    }
  }
  // Calls body(row, row of the run).
  template <typename Body>
  ITM_FAST_DEVICE void for_each_row_of_run(const Body& body) const {
    for_each_row(n_run_, [&](int row) { body(run_ + row, row); });
  }
  // For `count` columns of a finished product: calls of_column(column of the tile), and what it returns for each
  // (row of the run, product).
  template <typename OfColumn>
  ITM_FAST_DEVICE void for_each_product(int count, const OfColumn& of_column) const {
    ITM_FAST_TILE_SCORES(Tile);
    for (int c = lane(); c < count; c += 32) {
      const auto body = of_column(c);
      for (int place = warp(); place < n_run_; place += Tile::kWarps) {
        body(place, static_cast<float>(scores[place * kStride + c]));
      }
    }
  }
  // The same for code that also reads a number from global memory: of_column(column) returns a Reader, and `use` gets
  // the number, too. See load_ahead.
  template <typename OfColumn>
  ITM_FAST_DEVICE void for_each_product_and_number(int count, const OfColumn& of_column) const {
    ITM_FAST_TILE_SCORES(Tile);
    for (int c = lane(); c < count; c += 32) {
      const auto reader = of_column(c);
      const auto place = [](int i) { return warp() + i * Tile::kWarps; };
      load_ahead(
          0, (n_run_ - warp() + Tile::kWarps - 1) / Tile::kWarps, [&](int i) { return reader.read(place(i)); },
          [&](int i, float number) {
            reader.use(place(i), static_cast<float>(scores[place(i) * kStride + c]), number);
          });
    }
  }
  // Pads rows of an operand with zeros to whole copies.
  ITM_FAST_DEVICE static void pad_rows(S* rows, int n_rows, int64_t stride, int columns) {
    const int padding = static_cast<int>(operand_stride(columns)) - columns;
    if (padding == 0) return;
    for_each_row(n_rows, [&](int row) {
      if (lane() < padding) narrow(0.0f, rows[row * stride + columns + lane()]);
    });
  }
  // Calls body(first output, number of outputs) for each block of a layer's outputs, after the product of the rows with
  // its weights. A layer without outputs has one empty block, so that code that sums up outputs still gets a sum.
  template <typename Body>
  ITM_FAST_DEVICE static void for_each_output(const S* rows, int n_rows, int64_t stride, const LayerOperand<S>& layer,
                                              const Body& body) {
    int first = 0;
    do {
      const int count = part(first, layer.outputs, kColumns);
      multiply_operands<kParts, Tile>(rows, n_rows, stride, layer.packed + first * layer.stride(), count,
                                      layer.stride(), layer.inputs);
      body(first, count);
      first += kColumns;
    } while (first < layer.outputs);
  }

  // The temperature of the first attention.
  ITM_FAST_DEVICE float first_temperature() const {
    return p_.options.learned_factors ? *p_.temperature : p_.attention.temperature;
  }
  ITM_FAST_DEVICE S* hidden_of(int step) const {
    return of_block(p_.slab.hidden) + int64_t{step} * p_.rows * operand_stride(p_.hidden);
  }

  // Divides a vector of alignments by its norm if `normalizes`, and writes the result to the operand, too. For a warp.
  ITM_FAST_DEVICE void finish_vector(float* vector, S* operand, bool normalizes) const {
    float square = 0.0f, scale = 1.0f;
    for (int i = lane(); i < width_; i += 32) square += vector[i] * vector[i];
    square = add_lanes(square);
    if (normalizes) scale /= sqrtf(square) + static_cast<float>(kNormEpsilon);
    for (int i = lane(); i < width_; i += 32) {
      vector[i] *= scale;
      narrow(vector[i], operand[i]);
    }
    for (int i = width_ + lane(); i < width_stride_; i += 32) narrow(0.0f, operand[i]);
  }

  // Writes score_of(set), one thread per set of the tile; 0 if a side is empty.
  template <typename ScoreOf>
  ITM_FAST_DEVICE void write_scores(const ScoreOf& score_of) const {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    for (int set = thread_index(); set < s_.n_sets; set += Tile::kThreads) {
      const bool is_empty = starts[set + 1] == starts[set];
      p_.scores[(s_.first_set + set) * p_.contexts.n_sets + s_.context] = is_empty ? 0.0f : score_of(set);
    }
  }

  const RegulationProblem<S>& p_;
  const RegulationState s_;
  const int corresponded_, dim_, width_;
  const int64_t dim_stride_, width_stride_;
  const int64_t slab_;  // bytes from the slab of block 0 to this block's slab
  int run_ = 0, n_run_ = 0;
};

// Names that a class template derived from RegulationStep uses.
#define ITM_FAST_REGULATION_STEP                                                                            \
  using Step = RegulationStep<kParts, Tile, S>;                                                             \
  using typename Step::Memory;                                                                              \
  using Step::kColumns, Step::kChunk, Step::kStride, Step::p_, Step::s_, Step::corresponded_, Step::dim_;   \
  using Step::width_, Step::dim_stride_, Step::width_stride_, Step::of_block, Step::part, Step::query;      \
  using Step::for_each_row, Step::for_each_run, Step::for_each_row_of_run, Step::for_each_product;          \
  using Step::for_each_product_and_number, Step::for_each_output, Step::first_temperature, Step::hidden_of, \
      Step::finish_vector;                                                                                  \
  using Step::pad_rows, Step::write_scores, Step::run_, Step::n_run_;                                       \
                                                                                                            \
 public:                                                                                                    \
  using Step::Step

}  // namespace itm_fast::cuda
