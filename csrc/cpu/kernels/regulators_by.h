// The kernel table of one way to compute products. Only kernel files include it.
#pragma once

#include "cpu/kernels/regulators.h"
#include "itm_fast/cpu/regulators.h"

namespace itm_fast::ITM_FAST_ISA {

template <typename Product>
struct RegulatorsBy {
  using T = typename Product::Value;
  using Cell = typename Product::Cell;
  static_assert(kBiasStep % kPanelColumns<T> == 0 && Product::kParts * kDepth <= kLineCells);

  static void pack(const T* weight, int64_t outputs, int64_t inputs, T* line, T* packed) {
    pack_columns<Product>(weight, outputs, inputs, packed_size<Product>(outputs, inputs) / Product::kParts,
                          reinterpret_cast<Cell*>(line), reinterpret_cast<Cell*>(packed));
  }

  static int64_t workspace(const RegulatorSizes& sizes, const RegulatorOptions& options) {
    return RegulatorLayout<Product>(sizes, options, false).total;
  }

  static void score_tile(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace, T* scores) {
    Regulation<Product>(problem, tile, workspace).score(scores);
  }

  static void align_tile(const RegulatorProblem<T>& problem, const RegulatorTile& tile, int64_t n_query_rows,
                         T* workspace, T* alignments) {
    Regulation<Product>(problem, tile, workspace).align(n_query_rows, alignments);
  }

  static constexpr RegulatorKernels<T> kTable{Product::kTileRows, packed_size<Product>, pack,
                                              workspace,          score_tile,           align_tile};
};

}  // namespace itm_fast::ITM_FAST_ISA
