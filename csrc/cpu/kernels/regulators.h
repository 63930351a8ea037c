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
  int64_t (*workspace)(const RegulatorSizes& sizes);
  // Writes the scores of a tile's pairs to scores[query * n_contexts + context]; skips pairs with an empty set.
  void (*score_tile)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace, T* scores);
  // Writes a tile's last alignments to alignments[(context * n_query_rows + query row) * width].
  void (*align_tile)(const RegulatorProblem<T>& problem, const RegulatorTile& tile, int64_t n_query_rows, T* workspace,
                     T* alignments);
};

inline constexpr int64_t kLineCells = 1024;

#define ITM_FAST_DECLARE(isa)                               \
  namespace isa {                                           \
  extern const RegulatorKernels<float> kRegulatorsFloat32;  \
  extern const RegulatorKernels<double> kRegulatorsFloat64; \
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
