"""Store embeddings: rows in bfloat16, or in int8 with one scale per row.

Inside: `encoded_rows`, `chosen_rows`, `decoded_rows`, `best_rows`, `stored_best_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.functional import maxsim_scores

__all__ = ["best_rows", "chosen_rows", "decoded_rows", "encoded_rows", "stored_best_rows"]

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


def best_rows(captions: Sequence[Any], images: Sequence[Any]) -> Tensor:
    """Score captions with images by MaxSim, the mean over words of the greatest inner product with a region.

    Args:
        captions: embeddings of n captions, an entry per model.
        images: embeddings of m images.

    Returns:
        float32 (n, m), the sum over the models that compare sets of rows.
    """
    found = torch.zeros(len(captions[0]), len(images[0]))
    for words, regions in zip(captions, images, strict=True):
        if isinstance(words, Fragments):
            found += maxsim_scores(words, regions, reduction="mean")
    return found


def stored_best_rows(query: Fragments, stored: Mapping[str, Tensor], sets: Tensor, *, reverse: bool) -> Tensor:
    """Score one set of rows with stored sets by MaxSim, mean over the rows that look for the best: (m,) float32.

    Args:
        query: one set (n, d).
        stored: as in `chosen_rows`.
        sets: int64 (m,).
        reverse: the rows of the stored sets look for the best row of the query, not the other way round.
    """
    if "scales" in stored:
        # There is no product of int8 and bfloat16.
        chosen = chosen_rows(stored, sets)
        values = chosen["values"].to(torch.bfloat16).mul_(chosen["scales"].to(torch.bfloat16)[:, None])
        ends = torch.cat([sets.new_zeros(1), chosen["lengths"].cumsum(0)])
        others, sets = Fragments(values, ends, check=False), torch.arange(len(sets))
    else:
        others = Fragments(stored["values"], stored["offsets"], check=False)
    own, first = query.to(torch.bfloat16), torch.zeros_like(sets)
    if reverse:
        found = maxsim_scores(others, own, pairs=torch.stack([sets, first], 1), reduction="mean")
    else:
        found = maxsim_scores(own, others, pairs=torch.stack([first, sets], 1), reduction="mean")
    return found.to(torch.float32)
