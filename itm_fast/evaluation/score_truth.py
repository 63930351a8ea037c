"""Protocols of COCO with more positives than the captions of an image: ECCV Caption, CxC and PMRP.

Inside: `score_truth`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from itm_fast.evaluation.array_likes import ArrayLike, as_integers
from itm_fast.evaluation.correlation import sampled_spearman, spearman
from itm_fast.evaluation.ground_truth import (
    Ids,
    OtherSplitError,
    Positives,
    Ratings,
    rated_positives,
    read_positives,
    read_ratings,
)
from itm_fast.evaluation.many_positives import positive_measures
from itm_fast.evaluation.measures import Measures
from itm_fast.evaluation.plausible import plausible_precision, read_classes
from itm_fast.evaluation.protocols import fold_indices
from itm_fast.evaluation.score_protocols import Scored
from itm_fast.evaluation.score_sources import EmbeddingScores, ScoreSource
from itm_fast.files import regular
from itm_fast.reference import validation

__all__ = ["score_truth"]

_DIRECTIONS = ("i2t", "t2i")
# With fewer queries, few of them may have their own image among the positives by chance.
_ENOUGH = 100
# The names of the files that contain the ground truth.
_CLASSES = "instances_val2014.json"


def score_truth(
    name: str,
    source: ScoreSource,
    caption_image: ArrayLike,
    folder: Path,
    ids: Ids,
    *,
    folds: int = 1,
    samples: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> Scored:
    """Evaluate scores by a protocol whose positives are in files.

    Args:
        name: "eccv", "cxc" or "pmrp".
        source: the scores.
        caption_image: index of the image of each caption, integers `(n_captions,)`: a tensor, an array or a list.
        folder: contains the files, under their published names.
        ids: COCO numbers of the images and captions.
        folds: number of folds of consecutive images, for PMRP from classes of objects.
        samples: samples of Spearman's correlation.
        seed: seed of these samples.
        progress: show a progress bar if stderr is a terminal.

    Returns:
        Measures in percent; correlations times 100.

    Raises:
        OSError: a file cannot be read.
        TypeError: `caption_image` does not hold integers.
        ValueError: a file is missing or damaged, or is for other images; or `caption_image` has another length.
    """
    owners = as_integers("caption_image", caption_image)
    validation.check_shape("caption_image", owners, (source.n_captions,), "as many as there are captions")
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'expected a folder, found a file' if folder.exists() else 'no such folder'}")
    if name == "cxc":
        return _cxc(source, owners, folder, ids, samples, seed, progress)
    if name == "pmrp" and regular.is_present(folder / _CLASSES):
        classes = read_classes(folder / _CLASSES, ids.images)
        parts = fold_indices(owners, source.n_images, folds, None)
        measures = Measures([images.numpy() for images, _ in parts], source.n_images)
        for direction in _DIRECTIONS:
            found = [
                plausible_precision(
                    source, owners, classes, direction, images=images, captions=captions, progress=progress
                )
                for images, captions in parts
            ]
            measures.add(f"{direction}_pmrp", *(np.concatenate(values) for values in zip(*found, strict=True)))
        return _scored(name, measures)
    if folds != 1:
        raise ValueError(f"folds: expected 1 with protocol {name}, got {folds}; only {_CLASSES} has folds")
    pm = name == "pmrp"
    if pm and not regular.is_present(folder / "pm_image_to_caption.json"):
        raise ValueError(f"{folder}: expected {_CLASSES} of COCO, or pm_image_to_caption.json of ECCV Caption")
    positives = read_positives(folder, "pm" if pm else "eccv", ids)
    measures = Measures([np.arange(source.n_images)], source.n_images)
    _add_positives(measures, source, owners, positives, {"r_precision": "pmrp"} if pm else None, name, progress)
    return _scored(name, measures)


def _add_positives(
    measures: Measures,
    source: ScoreSource,
    caption_image: Tensor,
    positives: tuple[Positives, Positives],
    names: Mapping[str, str] | None,
    description: str,
    progress: bool,
) -> None:
    """Add the measures of both directions; `names` chooses and renames some."""
    for direction, truth in zip(_DIRECTIONS, positives, strict=True):
        if missing := int(truth.missing.sum()):
            total = missing + sum(map(len, truth.items))
            warnings.warn(
                f"protocol {description}: {missing:,} of {total:,} positives ({direction}) are not among the numbers "
                "of the scores; they count as not found",
                stacklevel=2,
            )
        owners = truth.queries if direction == "i2t" else caption_image.numpy()[truth.queries]
        if direction == "t2i":
            _warn_of_order(owners, truth, description)
        found = positive_measures(source, truth, direction, progress=progress, description=description)
        for name, new in (names or {name: name for name in found}).items():
            measures.add(f"{direction}_{new}", owners, found[name])


def _warn_of_order(owners: np.ndarray, truth: Positives, description: str) -> None:
    """Warn if the positives of captions hardly contain their own images, as with numbers in another order."""
    right = sum(owner in items for owner, items in zip(owners.tolist(), truth.items, strict=True))
    if len(owners) >= _ENOUGH and right < len(owners) / 10:
        warnings.warn(
            f"protocol {description}: only {right:,} of {len(owners):,} captions have their own image among their "
            "positives: are --image-ids and --caption-ids in the order of the scores?",
            stacklevel=2,
        )


def _cxc(
    source: ScoreSource, caption_image: Tensor, folder: Path, ids: Ids, samples: int, seed: int, progress: bool
) -> Scored:
    ratings = _ratings(folder, ids)
    measures = Measures([np.arange(source.n_images)], source.n_images)
    recalls = {f"r{k}": f"r{k}" for k in (1, 5, 10)}
    _add_positives(measures, source, caption_image, rated_positives(ratings["sits"]), recalls, "cxc", progress)
    scored = _scored("cxc", measures)
    for task, rated in ratings.items():
        scores = _pair_scores(source, task, rated)
        if scores is None:
            warnings.warn(
                f"protocol cxc: a score matrix has no scores for {task.upper()}, which needs embeddings", stacklevel=2
            )
            continue
        mean, deviation = sampled_spearman(rated.first, rated.ratings, scores, samples=samples, seed=seed)
        scored.summary.update(
            {
                f"{task}_spearman": 100.0 * mean,
                f"{task}_spearman_std": 100.0 * deviation,
                f"{task}_spearman_all": 100.0 * spearman(rated.ratings, scores),
            }
        )
    return scored


def _ratings(folder: Path, ids: Ids) -> dict[str, Ratings]:
    """Read the ratings of each task, from the first split whose SITS has no other images and captions than the scores.

    Raises:
        OtherSplitError: no split has; the message is about the first one.
        ValueError: there is no file of SITS, or a file is damaged.
    """
    others: list[OtherSplitError] = []
    for split in ("test", "val"):
        paths = {task: folder / f"{task}_{split}.csv" for task in ("sits", "sts", "sis")}
        if not regular.is_present(paths["sits"]):
            continue
        try:
            ratings = {"sits": read_ratings(paths["sits"], ids.captions, ids.images)}
        except OtherSplitError as error:
            others.append(error)
            continue
        for task, known in (("sts", ids.captions), ("sis", ids.images)):
            if regular.is_present(paths[task]):
                ratings[task] = read_ratings(paths[task], known, known)
        return ratings
    if others:
        raise others[0]
    raise ValueError(f"{folder}: expected sits_test.csv of Crisscrossed Captions, and sts_test.csv and sis_test.csv")


def _pair_scores(source: ScoreSource, task: str, rated: Ratings) -> np.ndarray | None:
    """Return the scores of the rated pairs, NaN as the lowest; None for a score matrix without scores of the task."""
    first, second = torch.from_numpy(rated.first), torch.from_numpy(rated.second)
    if task == "sits":
        scores = source.pairs(second, first)
    elif isinstance(source, EmbeddingScores):
        scores = (source.caption_pairs if task == "sts" else source.image_pairs)(first, second)
    else:
        return None
    return scores.double().masked_fill(scores.isnan(), -torch.inf).numpy()


def _scored(name: str, measures: Measures) -> Scored:
    return Scored(name, dict(zip(measures.names, map(float, measures.values()), strict=True)), measures)
