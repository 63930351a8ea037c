// The kernels of domain_regularization, compiled once per instruction set. S is the storage type of rows, T the compute
// type.
#pragma once

#include <cstdint>

#include "itm_fast/bfloat16.h"

namespace itm_fast {

// Factors are dense and row-major: (n_rows, n_discriminators). All arrays except those of S have the compute type.
template <typename S, typename T>
struct DomainKernels {
  void (*widen)(const S* values, int64_t count, T* out);
  void (*narrow)(const T* values, int64_t count, S* out);
  // factors = rows (n_rows, dim) times the transpose of weights (n_discriminators, dim).
  void (*products)(const T* rows, int64_t n_rows, const T* weights, int64_t n_discriminators, int64_t dim, T* factors);
  // sums (n_discriminators, dim) += the transpose of factors times rows.
  void (*add_rows)(const T* factors, int64_t n_discriminators, const T* rows, int64_t n_rows, int64_t dim, T* sums);
  // gradient (n_rows, dim) += factors times weights.
  void (*add_weights)(const T* factors, int64_t n_rows, const T* weights, int64_t n_discriminators, int64_t dim,
                      T* gradient);
};

#define ITM_FAST_DECLARE(isa)                                  \
  namespace isa {                                              \
  extern const DomainKernels<float, float> kDomainFloat32;     \
  extern const DomainKernels<double, double> kDomainFloat64;   \
  extern const DomainKernels<BFloat16, float> kDomainBFloat16; \
  }
ITM_FAST_DECLARE(portable)
ITM_FAST_DECLARE(avx2)
ITM_FAST_DECLARE(avx512)
#undef ITM_FAST_DECLARE

}  // namespace itm_fast
