"""The field's evaluation protocols.

Inside: `evaluate` for a model and a data set, `evaluate_ensemble` for several models, `evaluate_scores` for a given
score matrix; `fold_indices`, `ranks_summary` and `mean_summary` for other scores.

| protocol | call |
| --- | --- |
| full (Flickr30K 1K, COCO 5K) | `folds=1` |
| COCO 1K, as in most papers: the mean over five folds of 1000 images | `folds=5` |
| the first 1000 images only | `first_images=1000` |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itm_fast.distributed import World
from itm_fast.evaluation.array_likes import ArrayLike, as_integers, as_tensor
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.evaluation.ranks import FoldRanks, Ranks
from itm_fast.evaluation.scoring import Gallery, Scorer, check_gallery, score_matrix
from itm_fast.evaluation.streaming import stream_ranks
from itm_fast.functional import recall_summary, retrieval_ranks
from itm_fast.ops.retrieval import check_caption_image
from itm_fast.reference import validation

__all__ = ["evaluate", "evaluate_ensemble", "evaluate_scores", "fold_indices", "mean_summary", "ranks_summary"]

_ROWS = 256  # rows of a given score matrix that the mean distance takes at a time


def evaluate(
    model: Scorer,
    dataset: Gallery,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
    tile_images: int = 256,
    tile_captions: int = 512,
    streaming: bool = False,
    progress: bool = False,
    description: str = "scores",
    world: World | None = None,
) -> dict[str, float]:
    """Compute the recalls of a model on a data set. Only pairs within a fold are scored.

    Args:
        model: as in `score_matrix`.
        dataset: as in `score_matrix`.
        folds: number of folds of consecutive images, equal in size. Retrieval runs within each fold.
        first_images: use only that many images and their captions; None: all.
        ties: "pessimistic" or "optimistic", as in `retrieval_ranks`.
        tile_images: images in a tile.
        tile_captions: captions in a tile.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        world: the processes that share the work; None: only this one.
        streaming: count ranks tile by tile with `stream_ranks`, without a score matrix.

    Returns:
        The keys of `itm_fast.functional.recall_summary`, and `mean_distance`, the mean score of the positives minus
        that of the negatives. `mean_distance` is missing without positives or negatives, or if a score is not finite.
        All values are means over the folds.

    Raises:
        TypeError: `dataset` is no data set.
        ValueError: a caption belongs to no image of the data set, `first_images` is out of range, `folds` does not
            divide the number of images, or a fold has no captions.
    """
    members, _ = evaluate_ensemble(
        [(model, dataset)],
        folds=folds,
        first_images=first_images,
        ties=ties,
        tile_images=tile_images,
        tile_captions=tile_captions,
        streaming=streaming,
        progress=progress,
        description=description,
        world=world,
    )
    return members[0]


def evaluate_ensemble(
    members: Sequence[tuple[Scorer, Gallery]],
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
    tile_images: int = 256,
    tile_captions: int = 512,
    streaming: bool = False,
    progress: bool = False,
    description: str = "scores",
    world: World | None = None,
    found: list[FoldRanks] | None = None,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Compute the recalls of each of several models, and of their ensemble, the mean of their scores.

    Args:
        members: each model with its data set. All data sets have the same images and captions; token ids differ if
            the models have different vocabularies.
        folds: number of folds, as in `evaluate`.
        first_images: use only that many images and their captions; None: all.
        ties: "pessimistic" or "optimistic", as in `retrieval_ranks`.
        tile_images: images in a tile.
        tile_captions: captions in a tile.
        streaming: count ranks tile by tile with `stream_ranks`, without a score matrix.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        world: the processes that share the work; None: only this one.
        found: takes the ensemble's ranks of each fold.

    Returns:
        One summary per member, in their order, and the summary of the ensemble.

    Raises:
        ValueError: there is no member, the data sets differ in their images or captions, or as in `evaluate`.
    """
    if not members:
        raise ValueError("members: expected at least one model with its data set")
    for _, dataset in members:
        check_gallery(dataset)
    first = members[0][1]
    for _, dataset in members[1:]:
        if dataset.n_images != first.n_images or not torch.equal(dataset.caption_image, first.caption_image):
            raise ValueError("members: expected the same images and captions in all data sets")
    alone: list[list[dict[str, float]]] = [[] for _ in members]
    together = []
    for fold, (images, captions) in enumerate(fold_indices(first.caption_image, first.n_images, folds, first_images)):
        if streaming:
            part = f", fold {fold + 1}/{folds}" if folds > 1 else ""
            ranks, of_mean = stream_ranks(
                members,
                images,
                captions,
                ties=ties,
                tile_images=tile_images,
                tile_captions=tile_captions,
                progress=progress,
                description=description + part,
                world=world,
            )
            for own, member in zip(ranks, alone, strict=True):
                member.append(ranks_summary(own, own.distance.value))
            together.append(ranks_summary(of_mean, MeanDistance.of_mean(own.distance for own in ranks)))
            if found is not None:
                found.append(FoldRanks(images, captions, of_mean.image_to_text, of_mean.text_to_image))
            continue
        total: Tensor | None = None
        of_fold: tuple[Tensor, Tensor] | None = None
        distances = [MeanDistance() for _ in members]
        for index, (model, dataset) in enumerate(members):
            parts = [description]
            parts += [f"model {index + 1}/{len(members)}"] if len(members) > 1 else []
            parts += [f"fold {fold + 1}/{folds}"] if folds > 1 else []
            scores = score_matrix(
                model,
                dataset,
                images=images,
                captions=captions,
                tile_images=tile_images,
                tile_captions=tile_captions,
                progress=progress,
                description=", ".join(parts),
                distance=distances[index],
                world=world,
            )
            of_fold = _ranks(scores, first.caption_image, images, captions, ties)
            alone[index].append(_summary(recall_summary(*of_fold), distances[index].value))
            total = scores if total is None else _add(total, scores)
        if total is not None and len(members) > 1:
            # The sum gives the same ranks as the mean, and has no ties from rounding in a division.
            of_fold = _ranks(total, first.caption_image, images, captions, ties)
            together.append(_summary(recall_summary(*of_fold), MeanDistance.of_mean(distances)))
        if found is not None and of_fold is not None:
            found.append(FoldRanks(images, captions, *of_fold))
    summaries = [mean_summary(summary) for summary in alone]
    return summaries, mean_summary(together) if len(members) > 1 else summaries[0]


def _add(total: Tensor, scores: Tensor) -> Tensor:
    """Add in place, into the tensor with the wider dtype: a score matrix may be large."""
    wider = torch.promote_types(total.dtype, scores.dtype)
    return total.add_(scores) if total.dtype == wider else scores.add_(total)


def evaluate_scores(
    scores: ArrayLike,
    caption_image: ArrayLike,
    *,
    folds: int = 1,
    first_images: int | None = None,
    ties: str = "pessimistic",
) -> dict[str, float]:
    """Compute the recalls of a score matrix.

    Args:
        scores: `(n_images, n_captions)`, floating point: a tensor, an array or a list of rows.
        caption_image: index of the image of each caption, integers `(n_captions,)`: a tensor, an array or a list.
        folds: as in `evaluate`.
        first_images: as in `evaluate`.
        ties: as in `evaluate`.

    Returns:
        The summary, as in `evaluate`.

    Raises:
        TypeError: `scores` are not floating point numbers, or `caption_image` does not hold integers.
        ValueError: as in `evaluate`, or `caption_image` has another length than `scores` has columns.
    """
    scores, caption_image = as_tensor("scores", scores).detach(), as_integers("caption_image", caption_image)
    validation.check_tensor("scores", scores, ("n_images", "n_captions"))
    validation.check_shape("caption_image", caption_image, scores.shape[1:], "as many as scores has columns")
    summaries = []
    for images, captions in fold_indices(caption_image, scores.shape[0], folds, first_images):
        block = scores[int(images[0]) : int(images[-1]) + 1]
        # Captions are mostly in the order of their images; a slice then avoids a copy.
        if len(captions) and int(captions[-1]) - int(captions[0]) + 1 == len(captions):
            block = block[:, int(captions[0]) : int(captions[-1]) + 1]
        else:
            block = block[:, captions]
        recalls = recall_summary(*_ranks(block, caption_image, images, captions, ties))
        distance, owners = MeanDistance(), caption_image[captions]
        for rows, chosen in zip(block.split(_ROWS), images.to(owners.device).split(_ROWS), strict=True):
            distance.add(rows, chosen[:, None] == owners)
        summaries.append(_summary(recalls, distance.value))
    return mean_summary(summaries)


def fold_indices(
    caption_image: Tensor, n_images: int, folds: int, first_images: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Return the indices of the images and of the captions of each fold, in ascending order.

    Raises:
        ValueError: a caption belongs to no image, `first_images` is out of range, or `folds` does not divide the number
            of images.
    """
    # Before the choice of images: captions of images that are left out must belong to an image, too.
    check_caption_image(caption_image, n_images)
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


def _ranks(block: Tensor, caption_image: Tensor, images: Tensor, captions: Tensor, ties: str) -> tuple[Tensor, Tensor]:
    return retrieval_ranks(block, caption_image[captions] - int(images[0]), ties)


def ranks_summary(ranks: Ranks, distance: float | None) -> dict[str, float]:
    """Summarise the ranks of one fold, with its mean distance if there is one."""
    return _summary(recall_summary(ranks.image_to_text, ranks.text_to_image), distance)


def _summary(recalls: dict[str, float], distance: float | None) -> dict[str, float]:
    return recalls if distance is None else {**recalls, "mean_distance": distance}


def mean_summary(summaries: list[dict[str, float]]) -> dict[str, float]:
    """Average the keys that all summaries have."""
    common = [key for key in summaries[0] if all(key in summary for summary in summaries)]
    return {key: sum(summary[key] for summary in summaries) / len(summaries) for key in common}
