#include "cpu/kernels/regulators.h"

#include "cpu/kernels/regulators_by.h"
#include "itm_fast/cpu/regulators_backward.h"

namespace itm_fast::ITM_FAST_ISA {
namespace {

template <typename T>
struct BackwardBy {
  using Product = Exact<T>;

  static int64_t transposed_size(int64_t outputs, int64_t inputs) { return packed_size<Product>(inputs, outputs); }

  static void pack_transposed(const T* weight, int64_t outputs, int64_t inputs, T* line, T* packed) {
    pack_factor<Product>(weight, outputs, inputs, line, packed);
  }

  static int64_t workspace(const RegulatorSizes& sizes, const RegulatorOptions& options) {
    return RegulatorBackwardLayout<Product>(sizes, options).total;
  }

  static void differentiate_scores(const RegulatorProblem<T>& problem, const RegulatorTile& tile, T* workspace,
                                   const T* gradients) {
    RegulationBackward<Product>(problem, tile, workspace).score(gradients);
  }

  static void differentiate_alignments(const RegulatorProblem<T>& problem, const RegulatorTile& tile,
                                       int64_t n_query_rows, T* workspace, const T* gradients) {
    RegulationBackward<Product>(problem, tile, workspace).align(n_query_rows, gradients);
  }

  static int64_t products_workspace(int64_t max_rows) { return RowsProductLayout<Product>(max_rows).total; }

  static constexpr RegulatorBackwardKernels<T> kTable{transposed_size,
                                                      pack_transposed,
                                                      workspace,
                                                      differentiate_scores,
                                                      differentiate_alignments,
                                                      list_weight_products<Product>,
                                                      products_workspace,
                                                      add_weight_gradient<Product>,
                                                      add_context_gradient<Product>,
                                                      add_query_gradient<Product>};
};

}  // namespace

const RegulatorKernels<float> kRegulatorsFloat32 = RegulatorsBy<Exact<float>>::kTable;
const RegulatorKernels<double> kRegulatorsFloat64 = RegulatorsBy<Exact<double>>::kTable;
const RegulatorBackwardKernels<float> kRegulatorsBackwardFloat32 = BackwardBy<float>::kTable;
const RegulatorBackwardKernels<double> kRegulatorsBackwardFloat64 = BackwardBy<double>::kTable;

}  // namespace itm_fast::ITM_FAST_ISA
