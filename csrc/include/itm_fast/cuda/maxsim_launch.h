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

// Adds the best partners, for the backward: one number for each row and set of the other side, or, if that is less,
// room for the longest set in every listed pair. `longest_query` and `longest_context` are at least the lengths of all
// sets, or 0: unknown.
template <typename Tile, typename S>
void place_maxsim_backward(MaxsimProblem<S>& p, int64_t longest_query, int64_t longest_context, Workspace& workspace) {
  place_maxsim<Tile>(p, workspace);
  const auto place = [&](bool is_needed, int64_t longest, int64_t n_rows, int64_t other_sets, int64_t& slot) {
    const int64_t room = longest > 0 && longest < n_rows ? longest : n_rows;
    const int64_t by_sets = other_sets * n_rows, by_pairs = p.n_pairs * room;
    const bool is_by_pairs = p.is_listed && by_pairs < by_sets;
    slot = is_by_pairs ? room : 0;
    return workspace.take<int32_t>(!is_needed ? 0 : is_by_pairs ? by_pairs : by_sets);
  };
  p.best_contexts = place(p.options.by_queries(), longest_query, p.queries.n_rows, p.contexts.n_sets, p.query_slot);
  p.best_queries = place(p.options.by_contexts(), longest_context, p.contexts.n_rows, p.queries.n_sets, p.context_slot);
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
