"""The best matches of each query, collected tile by tile.

Inside: `BestMatches`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itm_fast.evaluation.ordering import best_first

__all__ = ["BestMatches"]

_Best = tuple[Tensor, Tensor]


class BestMatches:
    """Keep the best captions of each image and the best images of each caption.

    Equal scores are in ascending order of their index, if tiles are added in this order. NaN is last.

    Args:
        image_tiles: indices of the images of each tile.
        caption_tiles: indices of the captions of each tile.
        k: number of captions per image.
        images_per_caption: number of images per caption; None: k.
    """

    def __init__(
        self,
        image_tiles: Sequence[Tensor],
        caption_tiles: Sequence[Tensor],
        k: int,
        images_per_caption: int | None = None,
    ) -> None:
        self._image_tiles, self._caption_tiles = image_tiles, caption_tiles
        self._k, self._of_caption = k, k if images_per_caption is None else images_per_caption
        self._of_images: list[_Best | None] = [None] * (len(image_tiles) if caption_tiles else 0)
        self._of_captions: list[_Best | None] = [None] * (len(caption_tiles) if image_tiles else 0)

    def add(self, row: int, column: int, scores: Tensor) -> None:
        """Add the scores of image tile `row` and caption tile `column`."""
        self._of_images[row] = _merged(self._of_images[row], scores, self._caption_tiles[column], self._k)
        self._of_captions[column] = _merged(
            self._of_captions[column], scores.t(), self._image_tiles[row], self._of_caption
        )

    @property
    def of_images(self) -> tuple[Tensor, Tensor]:
        """Scores in descending order and indices of the captions, both `(n_images, k)`."""
        return _joined(self._of_images, sum(map(len, self._image_tiles)))

    @property
    def of_captions(self) -> tuple[Tensor, Tensor]:
        """Scores in descending order and indices of the images, both `(n_captions, images_per_caption)`."""
        return _joined(self._of_captions, sum(map(len, self._caption_tiles)))


def _merged(best: _Best | None, scores: Tensor, indices: Tensor, k: int) -> _Best:
    """Merge `best` with the scores (n, m) of the items `indices` (m,), and keep the best `k`."""
    places = indices.expand(scores.shape)
    if best is not None:
        scores, places = torch.cat([best[0], scores], 1), torch.cat([best[1], places], 1)
    chosen = best_first(scores)[:, :k]
    return scores.gather(1, chosen), places.gather(1, chosen)


def _joined(parts: Sequence[_Best | None], n: int) -> _Best:
    found = [part for part in parts if part is not None]
    if not found:
        return torch.empty(n, 0), torch.empty(n, 0, dtype=torch.int64)
    return torch.cat([scores for scores, _ in found]), torch.cat([places for _, places in found])
