"""Measure how many candidates a search needs, and choose their number for a wanted recall.

Inside: `calibrate`, `candidate_ranks`, `recalls`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.search.index import Index
from itm_fast.search.queries import Queries
from itm_fast.search.searching import exact_hits, shortlist_places

__all__ = ["calibrate", "candidate_ranks", "recalls"]

# The smallest numbers of candidates that meet the wanted recall on few queries may miss it on others.
_LEAST = 20


def candidate_ranks(index: Index, texts: Sequence[str], k: int = 10, *, progress: bool = False) -> Tensor:
    """Return the place among the candidates, from 0, of each of the `k` images with the best scores.

    A search with n candidates finds the images whose place is below n, in the order of their scores, and perhaps more:
    the place is that without a shortlist before it.

    Args:
        index: the index; all its images are scored with each text.
        texts: n queries.
        k: images per query; fewer if the index has fewer.
        progress: show a progress bar on a terminal.

    Returns:
        int64 (n, k).
    """
    side, members = index.snapshot.sides["images"], index.members
    k = min(k, side.count)
    ranks = []
    for text in tqdm(texts, desc="calibrate", unit="query", leave=False, disable=None if progress else True):
        # Unlike what a person asks, a caption may consist of unknown words.
        query = Queries([text], "captions", members.encode_captions([text]), [-1])
        ((_, positions),) = exact_hits(side, members, query, "images", k)
        ranks.append(shortlist_places(index.snapshot, query, "images", positions))
    return torch.stack(ranks)


def recalls(ranks: Tensor, candidates: Sequence[int]) -> list[float]:
    """Return recall@k against an exact search for each number of candidates, from `candidate_ranks`."""
    return [float((ranks < number).double().mean()) for number in candidates]


def calibrate(
    index: Index, texts: Sequence[str], recall: float = 0.95, k: int = 10, *, progress: bool = False
) -> tuple[int, float]:
    """Choose the smallest number of candidates that reaches a recall on held-out queries, and keep it in the index.

    Args:
        index: the index, which must not be changed by another process.
        texts: queries that neither the model nor a learned pooling was trained on.
        recall: the wanted share of the exact best `k` images, above 0 and at most 1.
        k: results per query.
        progress: show a progress bar on a terminal.

    Returns:
        The number of candidates, at least 20, and the recall on these queries.

    Raises:
        ValueError: there are no queries or no images, or `recall` is out of bounds.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall: expected a number above 0 and at most 1, got {recall:g}")
    if not texts or not index.size("images"):
        raise ValueError("texts: expected at least one query, and an index with images")
    ranks = candidate_ranks(index, texts, k, progress=progress)
    ordered = ranks.flatten().sort().values
    needed = int(ordered[max(math.ceil(recall * len(ordered)) - 1, 0)]) + 1
    candidates = max(needed, min(_LEAST, index.size("images")))
    index.set_candidates(candidates)
    return candidates, recalls(ranks, [candidates])[0]
