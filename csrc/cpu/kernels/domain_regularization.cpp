#include "cpu/kernels/domain_regularization.h"

#include <type_traits>

#include "itm_fast/cpu/matrix.h"

namespace itm_fast::ITM_FAST_ISA {
namespace {

// Values of the compute type are not converted.
template <typename From, typename To>
void converted(const From* values, int64_t count, To* out) {
  if constexpr (!std::is_same_v<From, To>) convert(values, count, out);
}

template <typename T>
void products(const T* rows, int64_t n_rows, const T* weights, int64_t n_discriminators, int64_t dim, T* factors) {
  dot_products(rows, n_rows, weights, n_discriminators, dim, factors, n_discriminators);
}

// Few discriminators see a set; process several together so that they share each read of its rows.
template <typename T>
void add_rows(const T* factors, int64_t n_discriminators, const T* rows, int64_t n_rows, int64_t dim, T* sums) {
  constexpr int kMost = kVectorBytes == 64 ? 4 : 2;  // times 4 accumulators, of 32 or 16 registers
  int64_t i = 0;
  const auto add = [&]<int kTogether>(std::integral_constant<int, kTogether>) {
    for (; i + kTogether <= n_discriminators; i += kTogether) {
      add_product_rows<T, kTogether>(factors + i, 1, n_discriminators, n_rows, rows, dim, sums + i * dim);
    }
  };
  add(std::integral_constant<int, kMost>{});
  add(std::integral_constant<int, 2>{});
  add(std::integral_constant<int, 1>{});
}

template <typename T>
void add_weights(const T* factors, int64_t n_rows, const T* weights, int64_t n_discriminators, int64_t dim,
                 T* gradient) {
  add_product(factors, n_discriminators, int64_t{1}, n_rows, n_discriminators, weights, dim, gradient);
}

template <typename S, typename T>
constexpr DomainKernels<S, T> kKernels{converted<S, T>, converted<T, S>, products<T>, add_rows<T>, add_weights<T>};

}  // namespace

const DomainKernels<float, float> kDomainFloat32 = kKernels<float, float>;
const DomainKernels<double, double> kDomainFloat64 = kKernels<double, double>;
const DomainKernels<BFloat16, float> kDomainBFloat16 = kKernels<BFloat16, float>;

}  // namespace itm_fast::ITM_FAST_ISA
