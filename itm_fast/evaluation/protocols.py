"""The field's evaluation protocols.

Inside: `evaluate` for a model and a data set, `evaluate_scores` for a finished score matrix.

| protocol | call |
| --- | --- |
| full (Flickr30K 1K, COCO 5K) | `folds=1` |
| COCO 1K, as most papers report it: the mean over five folds of 1000 images | `folds=5` |
| the first 1000 images alone | `first_images=1000` |
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.evaluation.scoring import Gallery, Scorer, score_matrix
from itm_fast.functional import recall_summary, retrieval_ranks

__all__ = ["evaluate", "evaluate_scores"]


def evaluate(
    model: Scorer,
    dataset: Gallery,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
    tile_images: int = 256,
    tile_captions: int = 512,
    progress: bool = False,
    description: str = "scores",
) -> dict[str, float]:
    """Recalls of a model on a data set; only pairs within a fold are scored.

    Args:
        model: as in `score_matrix`.
        dataset: as in `score_matrix`.
        folds: number of equal runs of consecutive images, each retrieved from alone; the result is their mean.
        first_images: use only that many images and their captions.
        ties: "pessimistic" or "optimistic", as in `retrieval_ranks`.
        tile_images, tile_captions, progress, description: as in `score_matrix`.

    Returns:
        The keys of `itm_fast.functional.recall_summary`, each the mean over the folds.

    Raises:
        ValueError: `folds` does not divide the number of images, or a fold has no captions.
    """
    summaries = []
    for fold, (images, captions) in enumerate(_folds(dataset.caption_image, dataset.n_images, folds, first_images)):
        scores = score_matrix(
            model,
            dataset,
            images=images,
            captions=captions,
            tile_images=tile_images,
            tile_captions=tile_captions,
            progress=progress,
            description=description if folds == 1 else f"{description}, fold {fold + 1}/{folds}",
        )
        summaries.append(_summary(scores, dataset.caption_image, images, captions, ties))
    return _mean(summaries)


def evaluate_scores(
    scores: Tensor,
    caption_image: Tensor,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
) -> dict[str, float]:
    """Recalls of a score matrix; arguments and result as in `evaluate`.

    Args:
        scores: `(n_images, n_captions)`.
        caption_image: int64 `(n_captions,)`, the image that each caption belongs to.
    """
    summaries = []
    for images, captions in _folds(caption_image, scores.shape[0], folds, first_images):
        block = scores[int(images[0]) : int(images[-1]) + 1]
        # Captions mostly stand in the order of their images; then a slice serves and nothing is copied.
        if len(captions) and int(captions[-1]) - int(captions[0]) + 1 == len(captions):
            block = block[:, int(captions[0]) : int(captions[-1]) + 1]
        else:
            block = block[:, captions]
        summaries.append(_summary(block, caption_image, images, captions, ties))
    return _mean(summaries)


def _folds(caption_image: Tensor, n_images: int, folds: int, first_images: int | None) -> list[tuple[Tensor, Tensor]]:
    """Indices of the images and of the captions of each fold, in rising order."""
    if first_images is not None:
        if not 1 <= first_images <= n_images:
            raise ValueError(f"first_images: expected 1 to {n_images}, the number of images, got {first_images}")
        n_images = first_images
    if folds < 1 or n_images < 1 or n_images % folds:
        raise ValueError(f"folds: expected a divisor of the number of images, {n_images}, got {folds}")
    size = n_images // folds
    chosen = []
    for first in range(0, n_images, size):
        inside = (caption_image >= first) & (caption_image < first + size)
        chosen.append((torch.arange(first, first + size), inside.nonzero().squeeze(1)))
    return chosen


def _summary(block: Tensor, caption_image: Tensor, images: Tensor, captions: Tensor, ties: str) -> dict[str, float]:
    return recall_summary(*retrieval_ranks(block, caption_image[captions] - int(images[0]), ties))


def _mean(summaries: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(summary[key] for summary in summaries) / len(summaries) for key in summaries[0]}
