"""Rank the pairs of a score source tile by tile, fold by fold.

Inside: `Ranking`, `rank_folds`, `summarize`, `saved_rankings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.evaluation.best import BestMatches
from itm_fast.evaluation.protocols import fold_indices, mean_summary, ranks_summary
from itm_fast.evaluation.ranks import FoldRanks, Ranks
from itm_fast.evaluation.score_sources import ScoreSource
from itm_fast.evaluation.suspicion import Look
from itm_fast.reference import validation

__all__ = ["TILE_CAPTIONS", "TILE_IMAGES", "Ranking", "rank_folds", "saved_rankings", "summarize"]

TILE_IMAGES, TILE_CAPTIONS = 256, 1024


@attrs.frozen(eq=False)
class Ranking:
    """Ranks of one fold.

    Attributes:
        images: indices of its images, int64 `(n,)`.
        captions: indices of its captions, int64 `(m,)`.
        ranks: the ranks, in the order of `images` and `captions`.
        best_captions: indices of the best captions of each image, `(n, k)`; None if they were not asked for.
        best_images: indices of the best images of each caption, `(m, k)`; None as above.
    """

    images: Tensor
    captions: Tensor
    ranks: Ranks
    best_captions: Tensor | None
    best_images: Tensor | None

    @property
    def fold_ranks(self) -> FoldRanks:
        return FoldRanks(self.images, self.captions, self.ranks.image_to_text, self.ranks.text_to_image)


def rank_folds(
    source: ScoreSource,
    caption_image: Tensor,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
    top: int = 0,
    look: Look | None = None,
    progress: bool = False,
    description: str = "scores",
) -> list[Ranking]:
    """Rank all captions for each image of a fold, and all its images for each caption.

    Memory holds one tile of scores, and the best matches if `top` is not 0. Tiles with matching pairs are read twice.

    Args:
        source: the scores.
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        folds: as in `evaluate`.
        first_images: as in `evaluate`.
        ties: as in `evaluate`.
        top: number of best matches to keep for each query.
        look: collects what is suspicious about the scores.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.

    Raises:
        ValueError: as in `evaluate`, or `caption_image` has another length than the number of captions.
    """
    validation.check_shape("caption_image", caption_image, (source.n_captions,), "as many as there are captions")
    parts = fold_indices(caption_image, source.n_images, folds, first_images)
    steps = sum(-(-len(images) // TILE_IMAGES) * -(-len(captions) // TILE_CAPTIONS) for images, captions in parts)
    with tqdm(total=steps, desc=description, unit="tile", leave=False, disable=None if progress else True) as bar:
        return [_ranked(source, caption_image, images, captions, ties, top, look, bar) for images, captions in parts]


def summarize(rankings: Sequence[Ranking]) -> dict[str, float]:
    """Return the summary of `evaluate`: means over the folds."""
    return mean_summary([ranks_summary(fold.ranks, fold.ranks.distance.value) for fold in rankings])


def _ranked(
    source: ScoreSource,
    caption_image: Tensor,
    images: Tensor,
    captions: Tensor,
    ties: str,
    top: int,
    look: Look | None,
    bar: Any,
) -> Ranking:
    owners = caption_image[captions] - int(images[0])
    # Sorted by image, captions have their matching pairs in few tiles.
    order = torch.argsort(owners, stable=True)
    owners, chosen = owners[order], captions[order]
    ranks = Ranks(owners, len(images), ties)
    rows, columns = list(images.split(TILE_IMAGES)), list(chosen.split(TILE_CAPTIONS)) if len(chosen) else []
    for row, tile_images in enumerate(rows):
        first, last = torch.searchsorted(
            owners, torch.tensor([row * TILE_IMAGES, row * TILE_IMAGES + len(tile_images)])
        ).tolist()
        for column, tile_captions in enumerate(columns):
            start = column * TILE_CAPTIONS
            if start < last and start + len(tile_captions) > first:
                ranks.note_own(source.tile(tile_images, tile_captions), row * TILE_IMAGES, start)
    best = BestMatches(rows, columns, top) if top else None
    for row, tile_images in enumerate(rows):
        for column, tile_captions in enumerate(columns):
            scores = source.tile(tile_images, tile_captions)
            ranks.add(scores, row * TILE_IMAGES, column * TILE_CAPTIONS)
            if look is not None:
                look.add(scores, tile_images, tile_captions)
            if best is not None:
                best.add(row, column, scores)
            bar.update()
    back = torch.argsort(order)
    ranks.text_to_image, ranks.text_ties = ranks.text_to_image[back], ranks.text_ties[back]
    return Ranking(
        images,
        captions,
        ranks,
        None if best is None else best.of_images[1],
        None if best is None else best.of_captions[1][back],
    )


def saved_rankings(rankings: Sequence[Ranking], top: int | None = None) -> dict[str, npt.NDArray[np.int64]]:
    """Return ranks and best matches of all queries, to be saved.

    Args:
        rankings: the ranking of each fold.
        top: number of best matches; None: all that were kept.

    Returns:
        `images` and `captions`: the queries, by their index. `image_to_text` and `text_to_image`: their ranks from 0,
        -1 for an image without captions. `best_captions` and `best_images`, if they were asked for: indices of the best
        matches of each query within its fold.
    """
    arrays = {
        "images": [fold.images for fold in rankings],
        "image_to_text": [fold.ranks.image_to_text for fold in rankings],
        "captions": [fold.captions for fold in rankings],
        "text_to_image": [fold.ranks.text_to_image for fold in rankings],
    }
    for name in ("best_captions", "best_images"):
        found = [getattr(fold, name) for fold in rankings]
        if all(one is not None for one in found):
            arrays[name] = [one[:, :top] for one in found]
    # Folds may have different numbers of captions, so that fewer than k matches exist in one.
    return {name: torch.cat([_padded(part, parts) for part in parts]).numpy() for name, parts in arrays.items()}


def _padded(part: Tensor, parts: Sequence[Tensor]) -> Tensor:
    if part.ndim == 1:
        return part
    width = max(other.shape[1] for other in parts)
    return torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1)
