"""Count ranks from tiles of scores.

Inside: `FoldRanks`, `Ranks`, `compared`.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import attrs
import torch
from torch import Tensor

from itm_fast.distributed import World, gather_rows, sum_of_all
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.ops.retrieval import TIES
from itm_fast.reference import validation

__all__ = ["FoldRanks", "Ranks", "compared"]


@attrs.frozen(eq=False)
class FoldRanks:
    """The ranks of one fold.

    Attributes:
        images: indices of its images, int64 `(n,)`.
        captions: indices of its captions, int64 `(m,)`.
        image_to_text: int64 `(n,)`: rank from 0 of the best own caption; -1 without captions.
        text_to_image: int64 `(m,)`: rank from 0 of the own image.
    """

    images: Tensor
    captions: Tensor
    image_to_text: Tensor
    text_to_image: Tensor


class Ranks:
    """Count ranks, ties and the mean distance from tiles of scores in any order.

    Args:
        owners: position of each caption's image among the images, int64 `(n_captions,)`; in ascending order if there
            are several processes.
        n_images: number of images.
        ties: "pessimistic" or "optimistic", as in `itm_fast.functional.retrieval_ranks`; ValueError for others.

    Attributes:
        image_to_text: int64 `(n_images,)`: rank from 0 of the best own caption; -1 without captions.
        text_to_image: int64 `(n_captions,)`: rank from 0 of the own image.
        image_ties: int64 `(n_images,)`: other captions with the score of the best own one.
        text_ties: int64 `(n_captions,)`: other images with the score of the own one.
        distance: the mean distance.
    """

    def __init__(self, owners: Tensor, n_images: int, ties: str) -> None:
        validation.check_option("ties", ties, TIES)
        self._owners, self._pessimistic = owners, ties == "pessimistic"
        self._own: Tensor | None = None
        self._best = torch.full((n_images,), torch.nan, dtype=torch.float64)
        self.image_to_text, self.image_ties = torch.zeros(2, n_images, dtype=torch.int64)
        self.text_to_image, self.text_ties = torch.zeros(2, len(owners), dtype=torch.int64)
        self.image_to_text[torch.bincount(owners, minlength=n_images) == 0] = -1
        self.distance = MeanDistance()

    def note_own(self, tile: Tensor, row: int, column: int) -> None:
        """Store the matching scores of a tile that starts at image `row` and caption `column`, before `add`."""
        owners = self._owners[column : column + tile.shape[1]]
        inside = (owners >= row) & (owners < row + tile.shape[0])
        columns = inside.nonzero().squeeze(1)
        scores = tile[owners[columns] - row, columns].to(torch.float64)
        if self._own is None:
            self._own = torch.full((len(self._owners),), torch.nan, dtype=torch.float64)
        self._own[column + columns] = scores
        # The best score of an image with its own captions; NaN is the lowest value.
        comparable = ~scores.isnan()
        lowest = self._best.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        lowest.scatter_reduce_(0, owners[columns][comparable], scores[comparable], "amax")
        known = ~self._best.isnan()
        known[owners[columns][comparable]] = True
        self._best = torch.where(known, lowest, torch.nan)

    def note_others(self, world: World) -> None:
        """Gather the matching scores of the other processes, each for its share of the images."""
        if world.size == 1:
            return
        own = torch.full((len(self._owners),), torch.nan, dtype=torch.float64) if self._own is None else self._own
        ends = [0, *accumulate(world.counts(len(self._best)))]
        places = torch.searchsorted(self._owners, torch.tensor(ends)).tolist()
        counts = [last - first for first, last in pairwise(places)]
        self._own = gather_rows(own[places[world.rank] : places[world.rank + 1]], counts, world)

    def add_others(self, world: World) -> None:
        """Add the counts of the other processes."""
        if world.size == 1:
            return
        self.text_to_image, self.text_ties = sum_of_all(torch.stack([self.text_to_image, self.text_ties]), world)
        counts = world.counts(len(self._best))
        rows = torch.stack([self.image_to_text, self.image_ties], 1)[world.share(len(self._best))]
        self.image_to_text, self.image_ties = gather_rows(rows, counts, world).unbind(1)
        self.distance.add_others(world)

    def add(self, tile: Tensor, row: int, column: int) -> None:
        """Count the scores of a tile that starts at image `row` and caption `column`."""
        rows, columns = slice(row, row + tile.shape[0]), slice(column, column + tile.shape[1])
        own = torch.arange(row, row + tile.shape[0])[:, None] == self._owners[columns]
        self.distance.add(tile, own)
        if self._own is None:
            raise ValueError("tiles: call note_own for all captions before add")
        # Exact in the type of the tile, from which the matching scores came.
        above, equal = self._compared(tile, self._own[columns].to(tile.dtype), own)
        self.text_to_image[columns] += above.sum(0)
        self.text_ties[columns] += equal.sum(0)
        above, equal = self._compared(tile, self._best[rows, None].to(tile.dtype), own)
        captioned = self.image_to_text[rows] >= 0
        self.image_to_text[rows] += torch.where(captioned, above.sum(1), 0)
        self.image_ties[rows] += torch.where(captioned, equal.sum(1), 0)

    def _compared(self, scores: Tensor, matching: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a score of another pair outranks the matching one, and where it equals it."""
        above, equal = compared(scores, matching)
        if bool(own.any()):
            equal &= ~own
            above &= ~own
        return (above | equal if self._pessimistic else above), equal


def compared(scores: Tensor, matching: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a score is above the matching one, and where it equals it.

    NaN is the lowest value and equals NaN.
    """
    equal, above = scores == matching, scores > matching
    lost = matching.isnan()
    if bool(lost.any()):
        equal |= lost & scores.isnan()
        above |= lost & ~scores.isnan()
    return above, equal
