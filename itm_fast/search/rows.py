"""Store embeddings: rows in bfloat16, or in int8 with one scale per row.

Inside: `encoded_rows`, `chosen_rows`, `decoded_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from itm_fast.fragments import Fragments

__all__ = ["chosen_rows", "decoded_rows", "encoded_rows"]

_LEVELS = 127


def encoded_rows(rows: Tensor, dtype: str) -> dict[str, Tensor]:
    """Return what is stored of rows (N, d) float: `values`, and for "int8" the `scales` (N,) float32.

    A row of int8 is `values * scale`, where the scale makes its greatest magnitude 127. A row of zeros stays zero.
    """
    if dtype == "bf16":
        return {"values": rows.to(torch.bfloat16)}
    rows = rows.to(torch.float32)
    scales = rows.abs().amax(1) / _LEVELS
    values = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return {"values": values, "scales": scales}


def chosen_rows(stored: Mapping[str, Tensor], sets: Tensor) -> dict[str, Tensor]:
    """Copy the rows of sets as they are stored.

    Args:
        stored: `values`, `offsets` (n_sets + 1,) int64, and `scales` if the values are int8.
        sets: int64 (m,), the sets to read, in any order.

    Returns:
        `values` and `scales` of these sets, and `lengths` (m,) int64.
    """
    # Fragments of integers do not exist; only their row numbers are wanted here.
    places = Fragments(torch.empty(0, 1), stored["offsets"], check=False)
    rows = places.row_index(sets)
    found = {name: stored[name].index_select(0, rows) for name in ("values", "scales") if name in stored}
    return {**found, "lengths": places.lengths[sets]}


def decoded_rows(parts: Sequence[Mapping[str, Tensor]]) -> Fragments:
    """Return the sets of one or more results of `chosen_rows`, end to end, as float32 Fragments."""
    lengths = torch.cat([part["lengths"] for part in parts])
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    # One buffer for all parts: memory of this size is fresh, and its first use takes longer than the conversion.
    values = torch.empty(int(ends[-1]), parts[0]["values"].shape[1])
    first = 0
    for part in parts:
        rows = values[first : first + len(part["values"])]
        rows.copy_(part["values"])
        if "scales" in part:
            rows.mul_(part["scales"][:, None])
        first += len(rows)
    return Fragments(values, ends, check=False)
