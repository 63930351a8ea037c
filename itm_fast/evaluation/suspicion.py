"""Say what is suspicious about given scores, because a wrong layout still gives numbers.

Inside: `Look`, `captions_per_image`, `suspicions`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itm_fast.evaluation.ranks import Ranks
from itm_fast.evaluation.score_sources import ScoreSource

__all__ = ["Look", "captions_per_image", "suspicions"]

# Ties of more queries than this are mentioned.
_TIES = 1000
_PER_IMAGE = 5
# With fewer captions, also the scores of a good model may be no higher than others by chance.
_ENOUGH = 500
# Sides of the square blocks in which evaluation scripts compute scores; SCAN's code takes 128.
_BLOCKS = (32, 64, 100, 128, 200, 256, 500, 512, 1000)
_PAIRS_IN_BLOCKS = 100


class Look:
    """Count what is suspicious in tiles of scores: values that are not finite, constant rows and columns.

    Args:
        n_images: number of images of the source.
        n_captions: number of captions of the source.
    """

    def __init__(self, n_images: int, n_captions: int) -> None:
        self.nan = self.infinite = 0
        self.first_nan: tuple[int, int] | None = None
        self._rows = _Extremes(n_images)
        self._columns = _Extremes(n_captions)

    def add(self, scores: Tensor, images: Tensor, captions: Tensor) -> None:
        """Look at the scores of a tile of images and captions."""
        lost = scores.isnan()
        count = int(lost.sum())
        if count:
            if self.first_nan is None:
                row, column = lost.nonzero()[0].tolist()
                self.first_nan = (int(images[row]), int(captions[column]))
            self.nan += count
        self.infinite += int(scores.isinf().sum())
        self._rows.add(scores, images, 1)
        self._columns.add(scores, captions, 0)

    @property
    def constant_images(self) -> Tensor:
        """Images that score all captions alike, int64."""
        return self._rows.constant

    @property
    def constant_captions(self) -> Tensor:
        """Captions that score all images alike, int64."""
        return self._columns.constant


class _Extremes:
    """Lowest and highest score of each row or column; NaN if one of its scores is NaN."""

    def __init__(self, n: int) -> None:
        self._lowest = torch.full((n,), torch.inf, dtype=torch.float64)
        self._highest = -self._lowest
        self._count = torch.zeros(n, dtype=torch.int64)

    def add(self, scores: Tensor, indices: Tensor, dim: int) -> None:
        self._lowest[indices] = torch.minimum(self._lowest[indices], scores.amin(dim).double())
        self._highest[indices] = torch.maximum(self._highest[indices], scores.amax(dim).double())
        self._count[indices] += scores.shape[dim]

    @property
    def constant(self) -> Tensor:
        # A single score is no sign of anything.
        return ((self._lowest == self._highest) & (self._count > 1)).nonzero().squeeze(1)


def suspicions(
    source: ScoreSource, caption_image: Tensor, look: Look, ranks: Sequence[Ranks], ties: str = "pessimistic"
) -> list[str]:
    """Return one line for each thing that is suspicious about scores.

    Args:
        source: the scores.
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        look: what was seen in all tiles.
        ranks: the ranks of each fold.
        ties: how they were counted, as in `itm_fast.functional.retrieval_ranks`.
    """
    found = []
    if look.nan:
        image, caption = look.first_nan or (0, 0)
        found.append(
            f"scores that are NaN: {look.nan:,}, the first of image {image} and caption {caption}; they count as the "
            "lowest"
        )
    if look.infinite:
        found.append(f"scores that are infinite: {look.infinite:,}")
    for what, others, constant in (
        ("image", "captions", look.constant_images),
        ("caption", "images", look.constant_captions),
    ):
        if len(constant):
            found.append(
                f"{what}s that have the same score with all {others}: {len(constant):,}, the first is {what} "
                f"{int(constant[0])}: were all rows and columns filled?"
            )
    found += captions_per_image(caption_image, source.n_images)
    found += _wrong_layout(source, caption_image, ranks)
    count = "count" if ties == "pessimistic" else "do not count"
    for kind, counts in (
        ("images", torch.cat([fold.image_ties for fold in ranks])),
        ("captions", torch.cat([fold.text_ties for fold in ranks])),
    ):
        tied = int((counts > 0).sum())
        if tied >= _TIES or 2 * tied > len(counts):
            found.append(
                f"for {tied:,} of {len(counts):,} {kind}, other pairs tie with the matching one; ties {count} as "
                "errors: are the scores rounded or saturated, or saved in half precision?"
            )
    return found


def captions_per_image(caption_image: Tensor, n_images: int) -> list[str]:
    """Return a line if images have another number of captions than those of the published data sets.

    Args:
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        n_images: number of images.
    """
    counts = torch.bincount(caption_image, minlength=n_images)
    if bool((counts == _PER_IMAGE).all()):
        return []
    least, most = int(counts.min()), int(counts.max())
    per_image = str(least) if least == most else f"{least} to {most}"
    return [f"captions per image: {per_image}; the published data sets have {_PER_IMAGE}"]


def _wrong_layout(source: ScoreSource, caption_image: Tensor, ranks: Sequence[Ranks]) -> list[str]:
    """Find transposed blocks, captions in another order than their images, and distances in place of scores."""
    values = [fold.distance.value for fold in ranks]
    known = [value for value in values if value is not None]
    if not known:
        return []
    distance = sum(known) / len(known)
    n_images, n_captions = source.n_images, source.n_captions
    captions = torch.arange(n_captions)
    own = source.pairs(caption_image, captions).double()
    if n_captions > n_images and n_captions % n_images == 0:
        cyclic = source.pairs(captions % n_images, captions).double()
        gain = float(cyclic.nanmean() - own.nanmean())
        if gain > max(2 * abs(distance), 1e-9) and gain > 3 * _standard_error(own):
            return [
                f"caption j scores higher with image j % {n_images} than with its own: are the captions in rounds, the "
                "first caption of all images before the second of any? Then give the image of each caption. Or was a "
                "matrix of captions x images reshaped in place of transposed?"
            ]
    error = _standard_error(own)
    if (size := _transposed_blocks(source, caption_image, own, float(own.nanmean()) - distance)) is not None:
        return [
            f"with each block of {size} x {size} scores transposed, matching pairs score higher: were the scores of a "
            "block stored as captions x images?"
        ]
    if abs(distance) <= 3 * error and n_captions >= _ENOUGH:
        return [
            "matching pairs score no higher than others on average: are the captions, or the numbers of their images, "
            "in another order, or is the model not trained?"
        ]
    if distance < -3 * error:
        return [
            f"matching pairs score {-distance:.3g} lower than others on average: are these distances, or captions in "
            "another order than the images?"
        ]
    return []


def _transposed_blocks(source: ScoreSource, caption_image: Tensor, own: Tensor, others: float) -> int | None:
    """Return the side of square blocks whose matching pairs score higher once transposed; None: there are none.

    Args:
        source: the scores.
        caption_image: index of the image of each caption.
        own: scores of the matching pairs.
        others: mean score of all others.
    """
    captions = torch.arange(source.n_captions)
    gains = {}
    for size in _BLOCKS:
        row, column = caption_image // size * size, captions // size * size
        whole = (row + size <= source.n_images) & (column + size <= source.n_captions)
        if int(whole.sum()) >= _PAIRS_IN_BLOCKS:
            transposed = source.pairs((row + captions % size)[whole], (column + caption_image % size)[whole])
            before = float(own[whole].nanmean())
            gain = float(transposed.double().nanmean()) - before
            error = _standard_error(own[whole])
            # In another order, a few of the transposed pairs match by chance.
            least = max(5 * error, 0.2 * error * len(transposed) ** 0.5)
            if gain > max(2 * abs(before - others), least, 1e-9):
                gains[size] = gain
    return max(gains, key=lambda size: gains[size], default=None)


def _standard_error(scores: Tensor) -> float:
    """Return the standard error of the mean of the scores that are finite."""
    scores = scores[scores.isfinite()]
    return float(scores.std()) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
