// The kernels that compute a loss and its gradient in one launch, and scale_gradient, in the shim. Each function
// returns an error message or an empty string.
#include "losses.h"

namespace {

template <typename Problem, typename T = typename Problem::T>
const char* run_with_gradient(const Settings& s, const Problem& problem, const TripletOptions& options, T* loss,
                              int64_t* negatives, int64_t n_negatives, T* grad_scores, T* grad_positive) {
  Exact<T> losses(loss, 1), outgoing(grad_scores, s.rows * s.columns), of_positive(grad_positive, s.anchors());
  Exact<int64_t> indices(negatives, n_negatives);
  std::string report_of;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletWithGradient<Problem> p{};
    p.forward.problem = p.backward.problem = problem;
    p.forward.options = p.backward.options = options;
    p.backward.grad_scores = outgoing.memory;
    p.backward.grad_positive = of_positive.memory;
    const auto memory =
        workspace_of([&](Workspace& w) { return place_with_gradient<Tile>(p, losses.memory, indices.memory, w); });
    const int64_t blocks = std::min(s.blocks, blocks_of<Tile>(s.rows, s.columns));
    report_of = shim::launch_together(blocks, Tile::kThreads, s.seed, [&] { triplet_with_gradient<Problem, Tile>(p); });
  });
  *loss = *losses.memory;
  std::copy_n(indices.memory, n_negatives, negatives);
  std::copy_n(outgoing.memory, s.rows * s.columns, grad_scores);
  if (grad_positive != nullptr) std::copy_n(of_positive.memory, s.anchors(), grad_positive);
  return report(report_of);
}

template <typename T>
const char* scale(const Settings& s, T* gradient, const T* factor) {
  Exact<T> values(gradient, s.rows);
  const Exact<T> one(factor, 1);
  const GradientScale<T> p{values.memory, s.rows, one.memory};
  const std::string problem = shim::launch_together(s.blocks, 64, s.seed, [&] { scale_gradient(p); });
  std::copy_n(values.memory, s.rows, gradient);
  return report(problem);
}

}  // namespace

#define ITM_FAST_ONE_LAUNCH(T, suffix)                                                                               \
  extern "C" const char* triplet_with_gradient_##suffix(const Settings* s, const T* scores, const bool* positives,   \
                                                        const T* positive_scores, T* loss, int64_t* negatives,       \
                                                        int64_t n_negatives, T* grad_scores, T* grad_positive) {     \
    const Inputs<T> inputs(*s, scores, positives, positive_scores);                                                  \
    return run_with_gradient(*s, inputs.problem, s->options(), loss, negatives, n_negatives, grad_scores,            \
                             grad_positive);                                                                         \
  }                                                                                                                  \
  extern "C" const char* boosting_with_gradient_##suffix(const Settings* s, const T* scores, const T* anchor_scores, \
                                                         const bool* positives, T* loss, int64_t* negatives,         \
                                                         int64_t n_negatives, T* grad_scores) {                      \
    const BoostingInputs<T> inputs(*s, scores, anchor_scores, positives);                                            \
    return run_with_gradient(*s, inputs.problem, shared_options(s->boosting()), loss, negatives, n_negatives,        \
                             grad_scores, static_cast<T*>(nullptr));                                                 \
  }                                                                                                                  \
  extern "C" const char* scale_gradient_##suffix(const Settings* s, T* gradient, const T* factor) {                  \
    return scale(*s, gradient, factor);                                                                              \
  }
ITM_FAST_ONE_LAUNCH(float, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_ONE_LAUNCH(double, float64)
#endif
