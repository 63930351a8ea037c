// The kernels of triplet_loss and hardest_negatives in the shim. Each function returns what went wrong, or an empty
// string.
#include <algorithm>
#include <string>
#include <vector>

#include "exact.h"
#include "itm_fast/cuda/triplet_launch.h"

namespace {

using namespace itm_fast;
using namespace itm_fast::cuda;

struct Settings {
  uint64_t seed;
  int64_t large, rows, columns;
  double margin, epsilon;
  int64_t mining, divisor, halve, directions, reduction;

  TripletOptions options() const {
    return {margin,
            epsilon,
            static_cast<Mining>(mining),
            static_cast<SelectiveDivisor>(divisor),
            halve != 0,
            static_cast<Directions>(directions),
            static_cast<Reduction>(reduction)};
  }
  int64_t anchors() const { return options().rows() ? rows : columns; }
};

template <typename T>
struct Inputs {
  Inputs(const Settings& s, const T* scores, const bool* positives, const T* positive_scores)
      : scores(scores, s.rows * s.columns),
        positives(positives, s.rows * s.columns),
        positive_scores(positive_scores, s.anchors()),
        problem{this->scores.memory, this->positives.memory, this->positive_scores.memory, s.rows, s.columns} {}
  Exact<T> scores;
  Exact<bool> positives;
  Exact<T> positive_scores;
  TripletProblem<T> problem;
};

template <typename Body>
void with_chosen_tile(int64_t large, const Body& body) {
  large != 0 ? body(LargeTile()) : body(SmallTile());
}

template <typename T>
const char* forward(const Settings& s, const T* scores, const bool* positives, const T* positive_scores, T* loss,
                    int64_t n_losses, int64_t* negatives, int64_t n_negatives) {
  const Inputs<T> inputs(s, scores, positives, positive_scores);
  Exact<T> losses(loss, n_losses);
  Exact<int64_t> indices(negatives, n_negatives);
  std::string problem;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletForward<T> p{};
    p.problem = inputs.problem;
    p.options = s.options();
    Workspace measured;
    const int64_t zeros = place_forward<T, Tile>(p, losses.memory, indices.memory, measured);
    // Nothing but the counters may be taken to be zero.
    std::vector<unsigned char> memory(measured.bytes(), 0xff);
    std::fill_n(memory.begin(), zeros, 0);
    Workspace workspace(memory.data());
    place_forward<T, Tile>(p, losses.memory, indices.memory, workspace);
    problem =
        shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed, [&] { triplet_forward<T, Tile>(p); });
  });
  std::copy_n(losses.memory, n_losses, loss);
  std::copy_n(indices.memory, n_negatives, negatives);
  return report(problem);
}

template <typename T>
const char* backward(const Settings& s, const T* grad_loss, int64_t n_losses, const T* scores, const bool* positives,
                     const T* positive_scores, const int64_t* negatives, int64_t n_negatives, T* grad_scores,
                     T* grad_positive) {
  const Inputs<T> inputs(s, scores, positives, positive_scores);
  const Exact<T> incoming(grad_loss, n_losses);
  const Exact<int64_t> indices(negatives, n_negatives);
  Exact<T> outgoing(grad_scores, s.rows * s.columns), of_positive(grad_positive, s.anchors());
  std::string problem;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletBackward<T> p{};
    p.problem = inputs.problem;
    p.options = s.options();
    p.grad_loss = incoming.memory;
    p.negatives = p.options.mining == Mining::all ? nullptr : indices.memory;
    p.grad_scores = outgoing.memory;
    p.grad_positive = of_positive.memory;
    Workspace measured;
    place_backward(p, measured);
    std::vector<unsigned char> memory(measured.bytes(), 0);
    Workspace workspace(memory.data());
    place_backward(p, workspace);
    problem =
        shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed, [&] { triplet_backward<T, Tile>(p); });
  });
  std::copy_n(outgoing.memory, s.rows * s.columns, grad_scores);
  if (grad_positive != nullptr) std::copy_n(of_positive.memory, s.anchors(), grad_positive);
  return report(problem);
}

template <typename T>
const char* hardest(const Settings& s, const T* scores, const bool* positives, T* values, int64_t* indices) {
  const Inputs<T> inputs(s, scores, positives, nullptr);
  Exact<T> found(values, 2 * s.rows);
  Exact<int64_t> where(indices, 2 * s.rows);
  std::string problem;
  with_chosen_tile(s.large, [&]<typename Tile>(Tile) {
    TripletForward<T> p{};
    p.problem = inputs.problem;
    p.options.mining = Mining::hardest;
    p.keeps_hardest = true;
    p.rows = {found.memory, where.memory};
    p.columns = {found.memory + s.rows, where.memory + s.rows};
    Workspace measured;
    const int64_t zeros = place_forward<T, Tile>(p, nullptr, nullptr, measured);
    std::vector<unsigned char> memory(measured.bytes(), 0xff);
    std::fill_n(memory.begin(), zeros, 0);
    Workspace workspace(memory.data());
    place_forward<T, Tile>(p, nullptr, nullptr, workspace);
    problem =
        shim::launch(blocks_of<Tile>(s.rows, s.columns), Tile::kThreads, s.seed, [&] { triplet_forward<T, Tile>(p); });
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

#define ITM_FAST_TRIPLET(T, suffix)                                                                                \
  extern "C" const char* triplet_forward_##suffix(const Settings* s, const T* scores, const bool* positives,       \
                                                  const T* positive_scores, T* loss, int64_t n_losses,             \
                                                  int64_t* negatives, int64_t n_negatives) {                       \
    return forward<T>(*s, scores, positives, positive_scores, loss, n_losses, negatives, n_negatives);             \
  }                                                                                                                \
  extern "C" const char* triplet_backward_##suffix(                                                                \
      const Settings* s, const T* grad_loss, int64_t n_losses, const T* scores, const bool* positives,             \
      const T* positive_scores, const int64_t* negatives, int64_t n_negatives, T* grad_scores, T* grad_positive) { \
    return backward<T>(*s, grad_loss, n_losses, scores, positives, positive_scores, negatives, n_negatives,        \
                       grad_scores, grad_positive);                                                                \
  }                                                                                                                \
  extern "C" const char* hardest_negatives_##suffix(const Settings* s, const T* scores, const bool* positives,     \
                                                    T* values, int64_t* indices) {                                 \
    return hardest<T>(*s, scores, positives, values, indices);                                                     \
  }                                                                                                                \
  extern "C" const char* hardest_negatives_backward_##suffix(const Settings* s, const T* grad_rows,                \
                                                             const T* grad_columns, const int64_t* row_indices,    \
                                                             const int64_t* column_indices, T* grad_scores) {      \
    return hardest_gradient<T>(*s, grad_rows, grad_columns, row_indices, column_indices, grad_scores);             \
  }
ITM_FAST_TRIPLET(float, float32)
#ifndef ITM_FAST_FLOAT32_ALONE
ITM_FAST_TRIPLET(double, float64)
#endif
