// regulated_scores and cross_attention_alignments on a GPU: the second launch, the whole chain for all pairs.
//
// A block takes a tile of query sets with one context set after another. Only scores, or the last alignments, leave it:
// data between two products is in shared memory or in the block's slab (regulation_problem.h). The steps and their
// order are those of the reference, `alignment_steps` and `regulate`. Products run on tensor cores, everything else is
// float32.
#pragma once

#include "itm_fast/cuda/regulation_alignment.h"
#include "itm_fast/cuda/regulation_steps.h"

namespace itm_fast::cuda {

template <int kParts, typename Tile, typename S>
class Regulation {
  using Memory = RegulationMemory<Tile>;
  using Steps = RegulatorSteps<kParts, Tile, S>;

 public:
  ITM_FAST_DEVICE Regulation(const RegulationProblem<S>& problem, const TileSets& sets, int64_t context) : p_(problem) {
    ITM_FAST_DYNAMIC_SHARED(int32_t, starts, Memory::kStarts, Memory::kStartCount);
    ITM_FAST_DYNAMIC_SHARED(int32_t, row_sets, Memory::kRowSets, kMostQueries);
    barrier();  // The tile before is done.
    if (warp() == 0) find_starts(p_.queries, sets, p_.rows, starts);
    barrier();
    for (int set = thread_index(); set < sets.n_sets; set += Tile::kThreads) {
      for (int row = starts[set]; row < starts[set + 1]; ++row) row_sets[row] = set;
    }
    if (thread_index() == 0) {
      ITM_FAST_DYNAMIC_SHARED(int64_t, state, Memory::kState, Memory::kStateCount);
      state[0] = sets.first_set;
      state[1] = sets.first_row;
      state[2] = context;
      state[3] = sets.n_sets;
      state[4] = starts[sets.n_sets];
      state[5] = p_.contexts.length(context);
    }
    barrier();
  }

  ITM_FAST_DEVICE void score() {
    const RegulationState state = state_of_tile<Tile>();
    if (state.n_contexts == 0 || state.n_rows == 0) {
      steps().write_zeros();
      return;
    }
    const RegulatorOptions& options = p_.options;
    for (int step = 0; step < n_steps(); ++step) {
      regulate_attention(step);
      if (!options.interleaved) continue;
      if (step == 0) steps().take_means();
      aggregate_tile<kParts, Tile>(p_, corresponded_, step);
    }
    if (!options.scored) {
      attend_tile<kParts, Tile>(p_, corresponded_);
      measure_tile<kParts, Tile>(p_, corresponded_);
      steps().write_mean_cosines();
      return;
    }
    if (!options.interleaved) {
      steps().take_means();
      for (int step = 0; step < options.n_aggregations; ++step) aggregate_tile<kParts, Tile>(p_, corresponded_, step);
    }
    steps().write_guided_scores();
  }

  ITM_FAST_DEVICE void align() {
    if (state_of_tile<Tile>().n_rows == 0) return;
    for (int step = 0; step < n_steps(); ++step) regulate_attention(step);
    steps().write_alignments();
  }

 private:
  ITM_FAST_DEVICE Steps steps() const { return Steps(p_, corresponded_); }
  ITM_FAST_DEVICE int n_steps() const {
    const int64_t aligned = p_.options.n_alignments, corresponded = p_.options.n_correspondences;
    return static_cast<int>(aligned > corresponded ? aligned : corresponded);
  }

  ITM_FAST_DEVICE void regulate_attention(int step) {
    if (step < p_.options.n_alignments) {
      attend_tile<kParts, Tile>(p_, corresponded_);
      if (p_.options.normalize_attended) find_norms_of_tile<kParts, Tile>(p_, corresponded_);
      align_tile<kParts, Tile>(p_, corresponded_, step);
    }
    if (step < p_.options.n_correspondences) {
      correspond_tile<kParts, Tile>(p_, corresponded_, step);
      corresponded_ = step + 1;
    }
  }

  const RegulationProblem<S>& p_;
  int corresponded_ = 0;  // finished correspondences
};

// If the tile's set or the context set exceeds the limits of the call, writes NaN. Callers check them beforehand.
template <typename S>
ITM_FAST_DEVICE void refuse_sets(const RegulationProblem<S>& p, const TileSets& sets, int64_t context) {
  const float nan = HUGE_VALF - HUGE_VALF;
  if (p.scores != nullptr) {
    for (int set = thread_index(); set < sets.n_sets; set += block_threads()) {
      p.scores[(sets.first_set + set) * p.contexts.n_sets + context] = nan;
    }
    return;
  }
  const int64_t last_row = p.queries.offset(sets.first_set + sets.n_sets);
  float* aligned = p.alignments + context * p.queries.n_rows * p.width;
  for (int64_t i = sets.first_row * p.width + thread_index(); i < last_row * p.width; i += block_threads()) {
    aligned[i] = nan;
  }
}

// Grid: any number of blocks, one per slab; each takes every grid_blocks()-th pair of a query tile and a context set.
template <int kParts, typename Tile, typename S>
ITM_FAST_DEVICE void regulate_tiles(const RegulationProblem<S>& p) {
  const int64_t n_tiles = *p.query_tiles.n_tiles;
  for (int64_t item = block_index(); item < n_tiles * p.contexts.n_sets; item += grid_blocks()) {
    const int64_t tile = item % n_tiles, context = item / n_tiles;
    const TileSets sets = open_tile(p.queries, p.query_tiles, tile, Tile::kRows);
    if ((sets.is_long && p.queries.length(sets.first_set) > p.rows) || p.contexts.length(context) > p.columns) {
      refuse_sets(p, sets, context);
      continue;
    }
    Regulation<kParts, Tile, S> regulation(p, sets, context);
    if (p.scores != nullptr) {
      regulation.score();
    } else {
      regulation.align();
    }
  }
}

}  // namespace itm_fast::cuda
