"""Store embeddings: rows in bfloat16, or in int8 with one scale per row.

Inside: `encoded_rows`, `decoded_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from itm_fast.fragments import Fragments

__all__ = ["decoded_rows", "encoded_rows"]

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


def decoded_rows(stored: Mapping[str, Tensor], sets: Tensor | None = None) -> Fragments:
    """Return stored sets as float32 Fragments.

    Args:
        stored: `values`, `offsets` (n_sets + 1,) int64, and `scales` if the values are int8.
        sets: int64 (m,), the sets to read, in any order; None: all.
    """
    # Fragments of integers do not exist; only their row numbers are wanted here.
    places = Fragments(stored["values"].new_empty((0, 1), dtype=torch.float32), stored["offsets"], check=False)
    rows: Tensor | slice = slice(None) if sets is None else places.row_index(sets)
    values = stored["values"][rows].to(torch.float32)
    if "scales" in stored:
        values = values * stored["scales"][rows][:, None]
    if sets is None:
        return Fragments(values, stored["offsets"], check=False)
    ends = torch.zeros(len(sets) + 1, dtype=torch.int64)
    torch.cumsum(places.lengths[sets], 0, out=ends[1:])
    return Fragments(values, ends, check=False)
