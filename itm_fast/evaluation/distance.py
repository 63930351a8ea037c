"""Mean distance between the scores of positives and negatives.

Inside: `MeanDistance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from itm_fast.distributed import World

__all__ = ["MeanDistance"]


class MeanDistance:
    """Mean score of the positives minus mean score of the negatives, accumulated tile by tile in float64.

    It measures how well the scores are separated, which recalls do not show.

    Source: MD in Diao et al., Deep Boosting Learning, section IV-A.
    """

    def __init__(self) -> None:
        self._positive = self._negative = 0.0
        self._positives = self._negatives = 0

    def add(self, tile: Tensor, positives: Tensor) -> None:
        """Add the scores of a tile.

        Args:
            tile: scores `(n, m)`.
            positives: bool `(n, m)`, True for pairs of an image and its own caption.
        """
        own = tile[positives].double()
        positive, count = float(own.sum()), own.numel()
        self._positive += positive
        self._positives += count
        self._negative += float(tile.double().sum()) - positive
        self._negatives += tile.numel() - count

    def add_others(self, world: World) -> None:
        """Add the sums of all other processes, which hold the scores of other pairs."""
        if world.size > 1:
            sums = world.objects((self._positive, self._negative))
            counts = world.objects((self._positives, self._negatives))
            self._positive, self._negative = (math.fsum(part) for part in zip(*sums, strict=True))
            self._positives, self._negatives = (sum(part) for part in zip(*counts, strict=True))

    @property
    def value(self) -> float | None:
        """Return the distance; None without positives or negatives, or if a score is not finite."""
        if not self._positives or not self._negatives:
            return None
        distance = self._positive / self._positives - self._negative / self._negatives
        return distance if math.isfinite(distance) else None

    @staticmethod
    def of_mean(members: Iterable[MeanDistance]) -> float | None:
        """Return the distance of the mean of several score matrices of the same pairs: the mean of their distances."""
        values = [member.value for member in members]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None
