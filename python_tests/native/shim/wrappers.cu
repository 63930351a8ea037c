// The GPU bodies of the wrappers, with the same functions as wrappers.cpp and product.cpp.
#include "wrappers.h"

#include <cuda_runtime_api.h>

#include "exact.h"
#include "product.h"

namespace {

using namespace itm_fast::cuda;

template <int kWrapper>
__global__ void wrapper_kernel(const uint32_t* in, uint32_t* out) {
  call_wrapper<kWrapper>(in, out);
}

template <bool kTransposed, bool kHalf>
__global__ void product_kernel(const ProductParameters parameters) {
  product<kTransposed, kHalf>(parameters);
}

// The first error of a run; later steps are skipped.
class Run {
 public:
  void check(cudaError_t error) {
    if (problem_.empty() && error != cudaSuccess) problem_ = std::string("CUDA error: ") + cudaGetErrorString(error);
  }
  bool good() const { return problem_.empty(); }
  const char* finish() {
    if (good()) check(cudaGetLastError());
    if (good()) check(cudaDeviceSynchronize());
    return report(problem_);
  }

 private:
  std::string problem_;
};

// A copy of an array on the device, freed by the destructor.
template <typename T>
class OnDevice {
 public:
  OnDevice(Run& run, const T* source, int64_t size) : run_(run), bytes_(size * sizeof(T)) {
    run_.check(cudaMalloc(&memory_, bytes_));
    if (run_.good()) run_.check(cudaMemcpy(memory_, source, bytes_, cudaMemcpyHostToDevice));
  }
  ~OnDevice() { cudaFree(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* get() const { return static_cast<T*>(memory_); }
  void copy_to(T* target) {
    if (run_.good()) run_.check(cudaMemcpy(target, memory_, bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  Run& run_;
  size_t bytes_;
  void* memory_ = nullptr;
};

template <bool kTransposed>
void launch_product(const ProductParameters& p, bool half) {
  const int64_t blocks =
      (p.rows + kProductRows - 1) / kProductRows * ((p.columns + kProductColumns - 1) / kProductColumns);
  (half ? product_kernel<kTransposed, true> : product_kernel<kTransposed, false>)<<<blocks, 32 * kProductWarps>>>(p);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* wrapper(int64_t number, int64_t, const uint32_t* in,
                                                                      int64_t n_in, uint32_t* out, int64_t n_out) {
  Run run;
  OnDevice<uint32_t> given(run, in, n_in), results(run, out, n_out);
  if (run.good()) {
    with_wrapper(
        number, [&]<typename Number>(Number) { wrapper_kernel<Number::value><<<1, 32>>>(given.get(), results.get()); });
  }
  results.copy_to(out);
  return run.finish();
}

extern "C" __attribute__((visibility("default"))) const char* product(int64_t, int64_t transposed, int64_t half,
                                                                      int64_t rows, int64_t columns, int64_t depth,
                                                                      const uint16_t* left, const uint16_t* right,
                                                                      float* out) {
  Run run;
  OnDevice<uint16_t> first(run, left, rows * depth), second(run, right, columns * depth);
  OnDevice<float> results(run, out, rows * columns);
  const ProductParameters p{first.get(), second.get(), results.get(), rows, columns, depth};
  if (run.good()) transposed != 0 ? launch_product<true>(p, half != 0) : launch_product<false>(p, half != 0);
  results.copy_to(out);
  return run.finish();
}
