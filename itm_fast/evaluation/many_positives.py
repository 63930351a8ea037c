"""Measures for queries with many positives: mAP@R, R-Precision and recalls.

Inside: `positive_measures`, `r_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.evaluation.ground_truth import Positives
from itm_fast.evaluation.score_sources import ScoreSource

__all__ = ["positive_measures", "query_blocks", "r_precision"]

# Scores of a block of queries with all their candidates that are read at a time. A file of scores needs long pieces.
_BLOCK = 4 * 2**20
# Scores that are ranked at a time, with about 100 bytes of intermediate results each.
_RANKED = 2**19
_RECALLS = (1, 5, 10)


def positive_measures(
    source: ScoreSource, positives: Positives, direction: str, *, progress: bool = False, description: str = "scores"
) -> dict[str, npt.NDArray[np.float64]]:
    """Rank all candidates of each query, and measure where its positives are.

    A negative of the same score precedes a positive. NaN is the lowest score. R is the number of positives of a query,
    those that the scores lack included.

    Args:
        source: the scores.
        positives: the positives of images (`direction` "i2t") or captions ("t2i").
        direction: "i2t" or "t2i".
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.

    Returns:
        By name, values in percent of each query: `map_at_r`, the mean over ranks r up to R of the precision at r where
        rank r is a positive, else 0; `r_precision`, the share of positives among the best R; `r1`, `r5` and `r10`, 100
        if a positive is among the best K.

    Source: Chun et al., ECCV Caption, section 4; Musgrave et al., A metric learning reality check, section 3.2.
    """
    blocks = query_blocks(source, positives.queries, direction, progress=progress, description=description)
    parts: dict[str, list[Tensor]] = {}
    for start, scores in blocks:
        right = _mask(positives.items[start : start + len(scores)], scores.shape[1])
        missing = torch.from_numpy(positives.missing[start : start + len(scores)])
        hits = _sorted_hits(scores, right)
        n = right.sum(1) + missing
        places = torch.arange(1, hits.shape[1] + 1)
        inside = places <= n[:, None]
        precision = hits.cumsum(1).double() / places
        parts.setdefault("map_at_r", []).append((precision * (hits & inside)).sum(1) / n)
        parts.setdefault("r_precision", []).append((hits & inside).sum(1).double() / n)
        for k in _RECALLS:
            parts.setdefault(f"r{k}", []).append(hits[:, :k].any(1).double())
    return {name: 100.0 * torch.cat(found).numpy() for name, found in parts.items()}


def r_precision(scores: Tensor, right: Tensor) -> Tensor:
    """Return the share of positives among the best R of each query, where R is their number; ties count as errors.

    Args:
        scores: `(n, m)`.
        right: bool `(n, m)`; each query has a positive.

    Returns:
        float64 `(n,)`.
    """
    scores = _comparable(scores)
    n = right.sum(1)
    # The score at rank R. The positives above it are found; those at it follow the negatives at it.
    last = scores.sort(dim=1, descending=True).values.gather(1, n[:, None] - 1)
    above, equal = scores > last, scores == last
    free = n - above.sum(1) - (equal & ~right).sum(1)
    found = (above & right).sum(1) + torch.minimum(free.clamp(min=0), (equal & right).sum(1))
    return found.double() / n


def query_blocks(
    source: ScoreSource,
    queries: npt.NDArray[np.int64],
    direction: str,
    *,
    candidates: Tensor | None = None,
    progress: bool,
    description: str,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the scores of some queries with all candidates, `(b, m)`, after the position of the first of them."""
    of_images = direction == "i2t"
    if candidates is None:
        candidates = torch.arange(source.n_captions if of_images else source.n_images)
    n_read, n_ranked = (max(n // len(candidates), 1) for n in (_BLOCK, _RANKED))
    chosen = torch.from_numpy(queries).split(n_read) if len(queries) else ()
    start = 0
    for block in tqdm(chosen, desc=f"{description} {direction}", leave=False, disable=None if progress else True):
        scores = source.tile(block, candidates) if of_images else source.tile(candidates, block).t()
        for part in scores.split(n_ranked):
            yield start, part
            start += len(part)


def _mask(items: Sequence[npt.NDArray[np.int64]], width: int) -> Tensor:
    mask = torch.zeros(len(items), width, dtype=torch.bool)
    for row, places in zip(mask, items, strict=True):
        row[torch.from_numpy(places)] = True
    return mask


def _sorted_hits(scores: Tensor, right: Tensor) -> Tensor:
    """Return which ranks are positives, bool `(n, m)`, with negatives first among equal scores."""
    first = right.to(torch.uint8).sort(dim=1, stable=True)
    order = _comparable(scores).gather(1, first.indices).sort(dim=1, descending=True, stable=True).indices
    return first.values.gather(1, order).bool()


def _comparable(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
