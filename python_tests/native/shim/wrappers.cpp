// The CPU bodies of the wrappers.
#include "wrappers.h"

#include "exact.h"

// Runs one wrapper in one warp; returns an error message or an empty string.
extern "C" const char* wrapper(int64_t number, int64_t seed, const uint32_t* in, int64_t n_in, uint32_t* out,
                               int64_t n_out) {
  using namespace itm_fast;
  const Exact<uint32_t> given(in, n_in);
  Exact<uint32_t> results(out, n_out);
  std::string problem = "no such wrapper";
  cuda::with_wrapper(number, [&]<typename Number>(Number) {
    problem = shim::launch(1, 32, seed, [&] { cuda::call_wrapper<Number::value>(given.memory, results.memory); });
  });
  std::copy_n(results.memory, n_out, out);
  return report(problem);
}
