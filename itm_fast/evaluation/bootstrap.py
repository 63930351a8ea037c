"""Uncertainty of measures: bootstrap intervals, and paired tests between two score matrices.

Inside: `Comparison`, `intervals`, `compare`.

Images are resampled, and their captions with them, because the captions of an image are not independent. The gallery
stays as it is: ranks are not counted again. With folds, each fold is resampled by itself. Images without queries are
not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from itm_fast.evaluation.measures import Floats, Measures

__all__ = ["Comparison", "compare", "intervals"]

CONFIDENCE = 0.95


@attrs.frozen
class Comparison:
    """A measure of two score matrices.

    Attributes:
        first: value of the first matrix.
        second: value of the second matrix.
        lowest: lower end of the 95 % bootstrap interval of `difference`; NaN without resamples.
        highest: its upper end.
        p: two-sided p-value of a paired permutation test: the probability of a difference at least as large if the
            results of each image are exchanged between the matrices at random.
    """

    first: float
    second: float
    lowest: float
    highest: float
    p: float

    @property
    def difference(self) -> float:
        """`first - second`: above 0 if the first matrix has the higher value."""
        return self.first - self.second


def intervals(measures: Measures, *, samples: int = 1000, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return the 95 % percentile bootstrap interval of each measure.

    Args:
        measures: the measures.
        samples: number of resamples; 0: no intervals.
        seed: seed of the resampling.

    Source: Efron, Bootstrap methods: another look at the jackknife, 1979.
    """
    if not samples:
        return {}
    drawn = np.array([measures.values(weights) for weights in _resamples(measures, samples, seed)])
    ends = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(measures.names, *ends, strict=True)}


def compare(
    first: Measures, second: Measures, *, samples: int = 1000, permutations: int = 10_000, seed: int = 0
) -> dict[str, Comparison]:
    """Compare the measures of two score matrices of the same images and captions.

    Both are resampled alike, so that the interval of a difference is narrower than those of the values.

    Args:
        first: measures of the first matrix.
        second: measures of the second matrix.
        samples: number of resamples; 0: no intervals.
        permutations: number of random exchanges for the p-values.
        seed: seed of the resampling and of the exchanges.

    Source: Smucker et al., A comparison of statistical significance tests for information retrieval evaluation, 2007.
    """
    ends = np.full((2, len(first.names)), np.nan)
    if samples:
        drawn = np.array([first.values(w) - second.values(w) for w in _resamples(first, samples, seed)])
        ends = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    by_image = first.differences(second)
    observed = np.abs(by_image.sum(1))
    random = np.random.default_rng([seed, 1])
    as_large = np.zeros(len(observed))
    for _ in range(permutations):
        signs = random.choice(np.array([-1.0, 1.0]), first.n_images)
        # Equal sums of other terms may differ by rounding.
        as_large += np.abs(by_image @ signs) >= observed - 1e-9
    ps = (1 + as_large) / (1 + permutations)
    values = zip(first.names, first.values(), second.values(), *ends, ps, strict=True)
    return {name: Comparison(*map(float, numbers)) for name, *numbers in values}


def _resamples(measures: Measures, samples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each image was drawn, with replacement and from its own fold."""
    random = np.random.default_rng([seed, 0])
    queried = measures.queried
    folds = [fold[queried[fold]] for fold in measures.folds]
    for _ in range(samples):
        weights = np.zeros(measures.n_images)
        # A measure of a fold without queries is NaN, whatever is drawn.
        for fold in filter(len, folds):
            drawn = random.integers(0, len(fold), len(fold))
            weights[fold] = np.bincount(drawn, minlength=len(fold))
        yield weights
