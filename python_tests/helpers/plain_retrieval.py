"""Retrieval measures of a score matrix as obvious loops in float64, without the package.

Inside: `Matrix`, `ranked`, `recalls`, `fold_means`, `standard`, `with_positives`, `spearman`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def ranked(scores: Sequence[float], right: set[int]) -> list[int]:
    """Return the candidates, best first. NaN is last, and a wrong candidate precedes a right one of equal score."""

    def key(candidate: int) -> tuple[bool, float, bool, int]:
        lost = math.isnan(scores[candidate])
        return lost, 0.0 if lost else -float(scores[candidate]), candidate in right, candidate

    return sorted(range(len(scores)), key=key)


def recalls(ranks: Sequence[int], prefix: str) -> dict[str, float]:
    """Recall at 1, 5 and 10 in percent, median and mean rank from 1; `ranks` count from 0."""
    found = {f"{prefix}_r{k}": 100.0 * sum(rank < k for rank in ranks) / len(ranks) for k in (1, 5, 10)}
    found[f"{prefix}_medr"] = math.floor(statistics.median(ranks)) + 1.0
    found[f"{prefix}_meanr"] = sum(ranks) / len(ranks) + 1.0
    return found


def standard(scores: Matrix, owners: Sequence[int]) -> dict[str, float]:
    """The summary of one fold: images are rows, `owners` gives the image of each caption."""
    image_ranks, caption_ranks = [], []
    for image, row in enumerate(scores):
        own = {caption for caption, owner in enumerate(owners) if owner == image}
        if own:
            image_ranks.append(next(rank for rank, caption in enumerate(ranked(row, own)) if caption in own))
    for caption, owner in enumerate(owners):
        caption_ranks.append(ranked([row[caption] for row in scores], {owner}).index(owner))
    found = {**recalls(image_ranks, "i2t"), **recalls(caption_ranks, "t2i")}
    found["rsum"] = sum(found[f"{prefix}_r{k}"] for prefix in ("i2t", "t2i") for k in (1, 5, 10))
    positive = [float(row[c]) for i, row in enumerate(scores) for c in range(len(owners)) if owners[c] == i]
    negative = [float(row[c]) for i, row in enumerate(scores) for c in range(len(owners)) if owners[c] != i]
    found["mean_distance"] = math.fsum(positive) / len(positive) - math.fsum(negative) / len(negative)
    return found


def fold_means(scores: Matrix, owners: Sequence[int], folds: int) -> dict[str, float]:
    """Means of `standard` over folds of consecutive images with their captions."""
    size = len(scores) // folds
    found = []
    for first in range(0, len(scores), size):
        inside = [caption for caption, owner in enumerate(owners) if first <= owner < first + size]
        block = [[scores[image][caption] for caption in inside] for image in range(first, first + size)]
        found.append(standard(block, [owners[caption] - first for caption in inside]))
    return {name: sum(one[name] for one in found) / folds for name in found[0]}


def with_positives(queries: dict[int, Sequence[float]], positives: dict[int, set[int]]) -> dict[str, float]:
    """mAP@R, R-Precision and recalls in percent, means over queries with a set of right candidates each."""
    found: dict[str, list[float]] = {name: [] for name in ("map_at_r", "r_precision", "r1", "r5", "r10")}
    for query, right in positives.items():
        order = ranked(queries[query], right)
        precisions = []
        for rank in range(1, len(right) + 1):
            hits = sum(candidate in right for candidate in order[:rank])
            # A positive that is no candidate is never found. Its place is a miss.
            hit = rank <= len(order) and order[rank - 1] in right
            precisions.append(hits / rank if hit else 0.0)
        found["map_at_r"].append(sum(precisions) / len(right))
        found["r_precision"].append(sum(candidate in right for candidate in order[: len(right)]) / len(right))
        for k in (1, 5, 10):
            found[f"r{k}"].append(float(any(candidate in right for candidate in order[:k])))
    return {name: 100.0 * sum(values) / len(values) for name, values in found.items()}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation: Pearson's of the ranks, where equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]

    x, y = ranks(first), ranks(second)
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
