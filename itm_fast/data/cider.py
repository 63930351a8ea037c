"""CIDEr-D: how well a caption agrees with the captions of an image, by n-grams.

Inside: `CiderD`.

Source: Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation" (CVPR 2015), section 4 and the variant
CIDEr-D of its public code: clipped counts and a Gaussian penalty on the difference in length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["CiderD"]

_LONGEST = 4  # n-grams of one to four words
_DEVIATION = 6.0  # of the penalty, in words
_SCALE = 10.0
# Odd, so that a word number is not lost in the product of 64 bits.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class CiderD:
    """CIDEr-D between captions of a data set and the captions of its images.

    Words are token numbers without the marks of a caption, such as `<start>` and `<end>`. Rare words are one word,
    `<unk>`.

    Args:
        token_ids: int32, the ids of all captions end to end.
        lengths: (n_captions,) int64, including the marks.
        caption_image: (n_captions,) int64, the image of each caption.
        marks: tokens before and after the words of a caption, as `Vocabulary.marks`.
    """

    def __init__(
        self, token_ids: Tensor, lengths: Tensor, caption_image: Tensor, marks: tuple[int, int] = (1, 1)
    ) -> None:
        # 0 is no word, so that "a" and "a 0" differ.
        self._ids = token_ids.numpy().astype(np.uint64) + np.uint64(1)
        self._lengths = (lengths.numpy() - sum(marks)).clip(min=0)
        self._first = np.cumsum(lengths.numpy()) - lengths.numpy() + marks[0]
        owners = caption_image.numpy()
        self._order = np.argsort(owners, kind="stable")
        self._sorted = owners[self._order]
        self._log_images = float(np.log(max(len(np.unique(owners)), 1)))
        self._known: list[tuple[np.ndarray, np.ndarray]] = []
        captions = np.arange(len(self._lengths))
        for grams, places in self._grams(captions):
            # An n-gram counts once per image.
            pairs = np.unique(np.stack([grams, owners[places].astype(np.uint64)], axis=1), axis=0)
            found, counts = np.unique(pairs[:, 0], return_counts=True)
            self._known.append((found, np.log(counts)))

    def scores(self, captions: Tensor, images: Tensor) -> Tensor:
        """Compare caption i with all captions of image i.

        Args:
            captions: (n,) int64. images: (n,) int64.

        Returns:
            (n,) float32, from 0 to 10; 0 for an image without captions.
        """
        wanted, owners = captions.numpy(), images.numpy()
        starts, ends = (np.searchsorted(self._sorted, owners, side=side) for side in ("left", "right"))
        references = [self._order[start:end] for start, end in zip(starts, ends, strict=True)]
        every = np.unique(np.concatenate([wanted, *references]))
        vectors = dict(zip(every.tolist(), self._vectors(every), strict=True))
        found = np.zeros(len(wanted), dtype=np.float32)
        for index, (caption, others) in enumerate(zip(wanted.tolist(), references, strict=True)):
            total = 0.0
            for other in others.tolist():
                gap = float(self._lengths[caption] - self._lengths[other])
                likeness = sum(map(_likeness, vectors[caption], vectors[other]))
                total += likeness / _LONGEST * float(np.exp(-(gap**2) / (2 * _DEVIATION**2)))
            found[index] = _SCALE * total / max(len(others), 1)
        return torch.from_numpy(found)

    def _vectors(self, captions: np.ndarray) -> list[list[tuple[dict[int, float], float]]]:
        """Return the weights of the n-grams of each caption and their norm, for each n."""
        vectors: list[list[tuple[dict[int, float], float]]] = [[] for _ in captions]
        for (grams, places), (known, logs) in zip(self._grams(captions), self._known, strict=True):
            rarity = self._log_images - logs[np.searchsorted(known, grams)]
            weights: list[dict[int, float]] = [{} for _ in captions]
            numbers = np.searchsorted(captions, places)
            for gram, number, value in zip(grams.tolist(), numbers.tolist(), rarity.tolist(), strict=True):
                weights[number][gram] = weights[number].get(gram, 0.0) + value
            for vector, weight in zip(vectors, weights, strict=True):
                vector.append((weight, sum(value * value for value in weight.values()) ** 0.5))
        return vectors

    def _grams(self, captions: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the hashes of the n-grams of some captions and the caption of each, for n = 1 to 4."""
        for n in range(1, _LONGEST + 1):
            counts = (self._lengths[captions] - n + 1).clip(min=0)
            places = np.repeat(captions, counts)
            shift = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = self._first[places] + shift
            hashes = np.zeros(len(places), dtype=np.uint64)
            for offset in range(n):
                hashes = (hashes ^ self._ids[starts + offset]) * _FACTOR
                hashes ^= hashes >> np.uint64(29)
            yield hashes, places


def _likeness(caption: tuple[dict[int, float], float], reference: tuple[dict[int, float], float]) -> float:
    (weights, norm), (others, other_norm) = caption, reference
    if not norm or not other_norm:
        return 0.0
    shared = sum(min(value, others[gram]) * others[gram] for gram, value in weights.items() if gram in others)
    return shared / (norm * other_norm)
