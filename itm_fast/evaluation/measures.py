"""Measures that are means over queries, kept image by image so that images can be resampled.

Inside: `Measures`, `recall_measures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from itm_fast.evaluation.ranks import FoldRanks

__all__ = ["Measures", "recall_measures"]

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_RECALLS = (1, 5, 10)


class Measures:
    """Values of queries, summed for each image: of the image itself as a query, or of its captions.

    A measure is the mean over folds of the mean over the queries of the images in a fold.

    Args:
        folds: indices of the images of each fold.
        n_images: number of images.
    """

    def __init__(self, folds: Sequence[Counts], n_images: int) -> None:
        self.folds, self.n_images = list(folds), n_images
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, Floats] = {}
        self._totals: dict[str, Sequence[str]] = {}

    def add(self, name: str, images: Counts, values: npt.ArrayLike) -> None:
        """Add a measure from the value and the image of each query, both `(n_queries,)`."""
        self._sums[name] = np.bincount(images, np.asarray(values), self.n_images).astype(np.float64)
        self._counts[name] = np.bincount(images, minlength=self.n_images).astype(np.float64)

    def add_total(self, name: str, parts: Sequence[str]) -> None:
        """Add a measure that is the sum of others."""
        self._totals[name] = tuple(parts)

    @property
    def names(self) -> list[str]:
        """Names of the measures, in the order in which they were added."""
        return [*self._sums, *self._totals]

    @property
    def queried(self) -> npt.NDArray[np.bool_]:
        """Whether an image has a query of any measure, `(n_images,)`."""
        return np.any([np.zeros(self.n_images), *self._counts.values()], axis=0)

    def values(self, weights: Floats | None = None) -> Floats:
        """Return the values of all measures.

        Args:
            weights: how often each image counts, `(n_images,)`; None: once.

        Returns:
            `(len(names),)`; NaN if no query of a fold counts.
        """
        weights = np.ones(self.n_images) if weights is None else weights
        with np.errstate(invalid="ignore", divide="ignore"):
            found = {
                name: float(
                    np.mean([sums[fold] @ weights[fold] / (counts[fold] @ weights[fold]) for fold in self.folds])
                )
                for name, sums, counts in self._parts()
            }
        return np.array([*found.values(), *(sum(found[part] for part in parts) for parts in self._totals.values())])

    def differences(self, other: Measures) -> Floats:
        """Return what each image adds to the differences `self - other` of all measures, `(len(names), n_images)`.

        Args:
            other: the same measures of other scores of the same pairs.
        """
        found = {}
        for name, sums, counts in self._parts():
            found[name] = np.zeros(self.n_images)
            for fold in self.folds:
                found[name][fold] = (sums[fold] - other._sums[name][fold]) / (counts[fold].sum() * len(self.folds))
        totals = [sum(found[part] for part in parts) for parts in self._totals.values()]
        return np.array([*found.values(), *totals])

    def _parts(self) -> Iterator[tuple[str, Floats, Floats]]:
        return ((name, sums, self._counts[name]) for name, sums in self._sums.items())


def recall_measures(folds: Sequence[FoldRanks], caption_image: Tensor, n_images: int) -> Measures:
    """Return recalls, mean ranks and RSUM, in the names and units of `itm_fast.functional.recall_summary`.

    Args:
        folds: the ranks of each fold.
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        n_images: number of images.
    """
    measures = Measures([fold.images.numpy() for fold in folds], n_images)
    for direction in ("i2t", "t2i"):
        ranks, images = [], []
        for fold in folds:
            of_images = direction == "i2t"
            found = (fold.image_to_text if of_images else fold.text_to_image).numpy()
            owners = (fold.images if of_images else caption_image[fold.captions]).numpy()
            # An image without captions is no query.
            ranks.append(found[found >= 0])
            images.append(owners[found >= 0])
        rank, image = np.concatenate(ranks), np.concatenate(images)
        for k in _RECALLS:
            measures.add(f"{direction}_r{k}", image, 100.0 * (rank < k))
        measures.add(f"{direction}_meanr", image, rank + 1.0)
    measures.add_total("rsum", [f"{direction}_r{k}" for direction in ("i2t", "t2i") for k in _RECALLS])
    return measures
