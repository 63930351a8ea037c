"""Pool the vectors of a set to one vector.

Inside: `mean_pool`, `final_states`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.nn.no_rows import connected
from itm_fast.reference import validation

__all__ = ["final_states", "mean_pool"]


def mean_pool(fragments: Fragments) -> Tensor:
    """Return the mean of each set, `(n_sets, d)` float32 (float64 for float64); zero for an empty set."""
    validation.check_fragments("fragments", fragments)
    values = fragments.values.to(torch.promote_types(fragments.dtype, torch.float32))
    sums = values.new_zeros(len(fragments), values.shape[1]).index_add(0, fragments.set_index(), values)
    return sums / fragments.lengths.clamp(min=1)[:, None]


def final_states(states: Fragments, *, bidirectional: bool = False) -> Tensor:
    """Return the final state for each set, `(n_sets, d)` float32 (float64 for float64); zero for an empty set.

    Args:
        states: rows `(N, d)` in the order of the words; `(N, 2 d)` if `bidirectional`, forward before backward.
        bidirectional: take the mean of the forward state after the last word and the backward state after the first.
    """
    validation.check_fragments("states", states)
    rows, dim = states.values.shape
    wide = torch.promote_types(states.dtype, torch.float32)
    if rows == 0:
        zeros = states.values.new_zeros(len(states), dim // 2 if bidirectional else dim, dtype=wide)
        return connected(zeros, [states.values])
    empty = (states.lengths == 0)[:, None]
    # Indices of empty sets may lie outside; what they select is replaced.
    last = states.values[(states.offsets[1:] - 1).clamp(min=0)].to(wide)
    if bidirectional:
        first = states.values[states.offsets[:-1].clamp(max=rows - 1)].to(wide)
        last = (last[:, : dim // 2] + first[:, dim // 2 :]) / 2
    return last.masked_fill(empty, 0.0)
