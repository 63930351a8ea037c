"""Spearman's correlation between scores and human ratings.

Inside: `spearman`, `sampled_spearman`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["sampled_spearman", "spearman"]

Floats = npt.NDArray[np.float64]


def spearman(first: Floats, second: Floats) -> float:
    """Return Spearman's rank correlation, `(n,)` each; equal values share their mean rank. NaN if one is constant."""
    x, y = _ranks(first), _ranks(second)
    x, y = x - x.mean(), y - y.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return float((x @ y) / np.sqrt((x @ x) * (y @ y)))


def sampled_spearman(
    queries: npt.NDArray[np.int64], ratings: Floats, scores: Floats, *, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return mean and standard deviation of Spearman's correlation over samples of the queries.

    The pairs of a query are not independent, so each sample takes half of the queries, and one rated pair of each.

    Args:
        queries: the query of each pair, `(n,)`.
        ratings: human ratings, `(n,)`.
        scores: scores of the model, `(n,)`.
        samples: number of samples.
        seed: seed of the sampling.

    Source: Parekh et al., Crisscrossed Captions, section 5.
    """
    order = np.argsort(queries, kind="stable")
    _, starts, counts = np.unique(queries[order], return_index=True, return_counts=True)
    random = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        chosen = random.permutation(len(starts))[: max(len(starts) // 2, 1)]
        pairs = order[starts[chosen] + random.integers(0, counts[chosen])]
        found.append(spearman(ratings[pairs], scores[pairs]))
    return float(np.mean(found)), float(np.std(found))


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2)[inverse]
    return ranks
