// The kernels of boosting_loss in the shim. Each function returns an error message or an empty string.
#include "losses.h"

#define ITM_FAST_BOOSTING(T, suffix)                                                                                 \
  extern "C" const char* boosting_forward_##suffix(const Settings* s, const T* scores, const T* anchor_scores,       \
                                                   const bool* positives, T* loss, int64_t n_losses,                 \
                                                   int64_t* negatives, int64_t n_negatives) {                        \
    const BoostingInputs<T> inputs(*s, scores, anchor_scores, positives);                                            \
    return run_forward(*s, inputs.problem, shared_options(s->boosting()), loss, n_losses, negatives, n_negatives);   \
  }                                                                                                                  \
  extern "C" const char* boosting_backward_##suffix(const Settings* s, const T* grad_loss, int64_t n_losses,         \
                                                    const T* scores, const T* anchor_scores, const bool* positives,  \
                                                    const int64_t* negatives, int64_t n_negatives, T* grad_scores) { \
    const BoostingInputs<T> inputs(*s, scores, anchor_scores, positives);                                            \
    return run_backward(*s, inputs.problem, shared_options(s->boosting()), grad_loss, n_losses, negatives,           \
                        n_negatives, grad_scores, static_cast<T*>(nullptr));                                         \
  }
ITM_FAST_BOOSTING(float, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_BOOSTING(double, float64)
#endif
