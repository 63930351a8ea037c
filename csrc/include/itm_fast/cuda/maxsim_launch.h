// Launch of the kernels of maxsim_scores: grids and workspace. Host code, shared by the launchers and the tests.
#pragma once

#include "itm_fast/cuda/maxsim_backward.h"

namespace itm_fast::cuda {

// Lays out the plans of both sides, for all pairs.
template <typename Tile, typename S>
void place_maxsim(MaxsimProblem<S>& p, Workspace& workspace) {
  if (p.is_listed) return;
  place_plan(p.context_tiles, most_tiles(p.contexts.n_sets, p.contexts.n_rows, Tile::kRows), workspace);
  place_plan(p.query_tiles, most_tiles(p.queries.n_sets, p.queries.n_rows, Tile::kColumns), workspace);
}

// Adds the best partners, for the backward. Their number does not depend on the lists: equal pairs share them.
template <typename Tile, typename S>
void place_maxsim_backward(MaxsimProblem<S>& p, Workspace& workspace) {
  place_maxsim<Tile>(p, workspace);
  p.best_contexts = workspace.take<int32_t>(p.options.by_queries() ? p.contexts.n_sets * p.queries.n_rows : 0);
  p.best_queries = workspace.take<int32_t>(p.options.by_contexts() ? p.queries.n_sets * p.contexts.n_rows : 0);
}

template <typename S>
int64_t maxsim_blocks(const MaxsimProblem<S>& p) {
  return p.is_listed ? p.n_pairs : p.context_tiles.capacity * p.query_tiles.capacity;
}

template <typename S>
int64_t gathering_blocks(const MaxsimGradients<S>& p) {
  return (p.of_queries != nullptr ? gather_blocks(p.scoring.queries.n_rows, p.scoring.dim) : 0) +
         (p.of_contexts != nullptr ? gather_blocks(p.scoring.contexts.n_rows, p.scoring.dim) : 0);
}

}  // namespace itm_fast::cuda
