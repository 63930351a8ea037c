// The kernels of triplet_loss and hardest_negatives in the shim. Each function returns an error message or an
// empty string.
#include "losses.h"

namespace {

template <typename T>
const char* hardest(const Settings& s, const T* scores, const bool* positives, T* values, int64_t* indices) {
  const Inputs<T> inputs(s, scores, positives, nullptr);
  Exact<T> found(values, 2 * s.rows);
  Exact<int64_t> where(indices, 2 * s.rows);
  std::string problem;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletForward<TripletProblem<T>> p{};
    p.problem = inputs.problem;
    p.options.mining = Mining::hardest;
    p.keeps_hardest = true;
    p.rows = {found.memory, where.memory, s.rows};
    p.columns = {found.memory + s.rows, where.memory + s.rows, s.rows};
    const auto memory =
        workspace_of([&](Workspace& w) { return place_forward<Tile>(p, static_cast<T*>(nullptr), nullptr, w); });
    problem = shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed,
                           [&] { triplet_forward<TripletProblem<T>, Tile>(p); });
  });
  std::copy_n(found.memory, 2 * s.rows, values);
  std::copy_n(where.memory, 2 * s.rows, indices);
  return report(problem);
}

template <typename T>
const char* hardest_gradient(const Settings& s, const T* grad_rows, const T* grad_columns, const int64_t* row_indices,
                             const int64_t* column_indices, T* grad_scores) {
  const Exact<T> of_rows(grad_rows, s.rows), of_columns(grad_columns, s.rows);
  const Exact<int64_t> rows(row_indices, s.rows), columns(column_indices, s.rows);
  Exact<T> outgoing(grad_scores, s.rows * s.rows);
  const HardestBackward<T> p{of_rows.memory, of_columns.memory, rows.memory, columns.memory, s.rows, outgoing.memory};
  std::string problem;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    problem =
        shim::launch(blocks_of<Tile>(s.rows, s.rows), Tile::kThreads, s.seed, [&] { hardest_backward<T, Tile>(p); });
  });
  std::copy_n(outgoing.memory, s.rows * s.rows, grad_scores);
  return report(problem);
}

}  // namespace

#define ITM_FAST_TRIPLET(T, suffix)                                                                                 \
  extern "C" const char* triplet_forward_##suffix(const Settings* s, const T* scores, const bool* positives,        \
                                                  const T* positive_scores, T* loss, int64_t n_losses,              \
                                                  int64_t* negatives, int64_t n_negatives) {                        \
    const Inputs<T> inputs(*s, scores, positives, positive_scores);                                                 \
    return run_forward(*s, inputs.problem, s->options(), loss, n_losses, negatives, n_negatives);                   \
  }                                                                                                                 \
  extern "C" const char* triplet_backward_##suffix(                                                                 \
      const Settings* s, const T* grad_loss, int64_t n_losses, const T* scores, const bool* positives,              \
      const T* positive_scores, const int64_t* negatives, int64_t n_negatives, T* grad_scores, T* grad_positive) {  \
    const Inputs<T> inputs(*s, scores, positives, positive_scores);                                                 \
    return run_backward(*s, inputs.problem, s->options(), grad_loss, n_losses, negatives, n_negatives, grad_scores, \
                        grad_positive);                                                                             \
  }                                                                                                                 \
  extern "C" const char* hardest_negatives_##suffix(const Settings* s, const T* scores, const bool* positives,      \
                                                    T* values, int64_t* indices) {                                  \
    return hardest<T>(*s, scores, positives, values, indices);                                                      \
  }                                                                                                                 \
  extern "C" const char* hardest_negatives_backward_##suffix(const Settings* s, const T* grad_rows,                 \
                                                             const T* grad_columns, const int64_t* row_indices,     \
                                                             const int64_t* column_indices, T* grad_scores) {       \
    return hardest_gradient<T>(*s, grad_rows, grad_columns, row_indices, column_indices, grad_scores);              \
  }
ITM_FAST_TRIPLET(float, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_TRIPLET(double, float64)
#endif
