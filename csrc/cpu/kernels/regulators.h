// The kernels of the regulators, compiled once per instruction set. T is the type of rows, sums and scores.
#pragma once

#include "itm_fast/regulators.h"

namespace itm_fast {

template <typename T>
struct RegulatorKernels {
  int64_t tile_rows;  // per tile, unless one query set has more
  int64_t (*packed_size)(int64_t outputs, int64_t inputs);
  // `line` is scratch memory of kLineCells.
  void (*pack)(const T* weight, int64_t outputs, int64_t inputs, T* line, T* packed);
  int64_t (*workspace)(const RegulatorSizes& sizes, const RegulatorOptions& options);
  // Writes the scores of a tile's pairs to scores[query * n_contexts + context]; skips pairs with an empty set.
  void (*score_tile)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace, T* scores);
  // Writes a tile's last alignments to alignments[(context * n_query_rows + query row) * width].
  void (*align_tile)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, int64_t n_query_rows, T* workspace,
                     T* alignments);
};

inline constexpr int64_t kLineCells = 1024;

// The product of a layer's gradients and inputs, which the backward leaves in the workspace of a tile. It is added to
// the gradient of the weight, and the sum of the gradients to that of the bias. A null weight marks a sum alone.
template <typename T>
struct WeightProduct {
  int64_t gradient, gradient_stride, outputs;
  int64_t input, input_stride, inputs;
  bool of_pairs;  // not of rows
  bool of_query;  // the inputs are the query rows
  T *weight, *sum;
};

template <typename T>
struct RegulatorBackwardKernels {
  // Packs a weight for products with gradients of its outputs.
  int64_t (*transposed_size)(int64_t outputs, int64_t inputs);
  void (*pack_transposed)(const T* weight, int64_t outputs, int64_t inputs, T* line, T* packed);
  int64_t (*workspace)(const RegulatorSizes& sizes, const RegulatorOptions& options);
  // Differentiates a tile, given the gradients of the scores, (query sets, context sets), or of the last alignments,
  // (context sets, query rows, width). Leaves the factors of the remaining products in the workspace.
  void (*differentiate_scores)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace,
                               const T* gradients);
  void (*differentiate_alignments)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, int64_t n_query_rows,
                                   T* workspace, const T* gradients);
  // Lists the products for the gradients of all weights, which lie one after the other. Returns their number.
  int64_t (*list_weight_products)(const RegulatorProblem<T>& problem, T* gradients, WeightProduct<T>* products);
  int64_t (*products_workspace)(int64_t max_rows);
  // Each adds one tile's part: to the gradient of outputs [first, last), at most max_rows, of a weight; of a slice's
  // context rows; of columns [first, last) of the query rows.
  void (*add_weight_gradient)(const RegulatorProblem<T>& problem, const RegulatorTile& tile,
                              const WeightProduct<T>& product, int64_t first, int64_t last, int64_t max_rows,
                              const T* workspace, T* scratch);
  void (*add_context_gradient)(const RegulatorProblem<T>& problem, const RegulatorSlice& slice, const T* workspace,
                               T* scratch, T* gradient);
  void (*add_query_gradient)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, int64_t first, int64_t last,
                             const T* workspace, T* gradient);
};

#define ITM_FAST_DECLARE(isa)                                               \
  namespace isa {                                                           \
  extern const RegulatorKernels<float> kRegulatorsFloat32;                  \
  extern const RegulatorKernels<double> kRegulatorsFloat64;                 \
  extern const RegulatorBackwardKernels<float> kRegulatorsBackwardFloat32;  \
  extern const RegulatorBackwardKernels<double> kRegulatorsBackwardFloat64; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

// Kernels with products of bfloat16, for processors with instructions for them. A null pack marks products that would
// be slower than float32.
struct LowPrecisionRegulators {
  RegulatorKernels<float> bf16, bf16x3;
};

#define ITM_FAST_DECLARE(isa)                                  \
  namespace isa {                                              \
  extern const LowPrecisionRegulators kLowPrecisionRegulators; \
  }
ITM_FAST_DECLARE(avx512_bf16)
ITM_FAST_DECLARE(amx)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
