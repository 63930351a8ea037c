"""The report of a training run on pictures: recalls, curves, search results and attention.

Inside: `write_run_report`, `check_pictures`, `searches`.
"""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import itm_fast
from itm_fast import evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji, open_split, picture_of, whole_picture_of
from itm_fast.files.environment import processor_name
from itm_fast.models import MatchingModel
from itm_fast.report.content import Report, WordAttention
from itm_fast.report.queries import image_query, text_query
from itm_fast.report.write import write_report
from itm_fast.training import run_folder
from itm_fast.training.loss_rules import mining_of
from itm_fast.training.metrics_log import read_metrics

__all__ = ["check_pictures", "searches", "write_run_report"]

QUERIES, ATTENTION, HITS = 12, 4, 5


def check_pictures(data: str | os.PathLike[str], split: str) -> None:
    """Raise ValueError if a split cannot be opened, or its pictures are unknown."""
    try:
        dataset = open_split(data, split, Vocabulary.build([]))
    except ValueError as error:
        raise ValueError(f"--report: {error}") from None
    if _picture(dataset, 0) is None:
        raise ValueError(
            f"--report: {data} contains features without pictures; expected a store that itm-fast data import wrote"
        )


def write_run_report(path: str | os.PathLike[str], run: str | os.PathLike[str], data: str, split: str) -> None:
    """Evaluate the best model of a run on a split, and write a page of its recalls, searches and attention.

    Args:
        path: HTML file to write, atomically.
        run: the run directory.
        data: a store of pictures, or one of features with their pictures.
        split: the split to search.

    Raises:
        ValueError: the run or the data are damaged, or the pictures are unknown. The message names the file.
    """
    config = run_folder.saved_config(Path(run))
    model = models.load(run, config.device)
    dataset = open_split(data, split, Vocabulary.from_file(Path(run) / run_folder.VOCABULARY))
    model.prepare(dataset)
    dataset.check_caption_lengths(model.max_caption_length)
    scores = evaluation.score_matrix(model, dataset, progress=True, description=split)
    metrics = read_metrics(Path(run) / run_folder.METRICS, ("step", "seconds"))
    names = dataset.image_ids or [f"image {number}" for number in range(dataset.n_images)]
    report = Report(
        title=f"Search with {model.name}",
        lead=f"The best model of {run} searches the {dataset.n_images:,} pictures of {split} in {data}.",
        trained=evaluation.evaluate_scores(scores, dataset.caption_image),
        untrained=None,
        metrics=metrics,
        facts=[
            ("Model", model.name),
            ("Parameters", f"{sum(one.numel() for one in model.parameters()) / 1e6:.2f} million"),
            *([("Vision model", config.image_backbone)] if config.image_backbone else []),
            *([("Started from", config.start)] if config.start else []),
            ("Negatives", mining_of(config).replace("_", "-")),
            ("Steps", f"{metrics[-1]['step']:,} of {config.batch_size} pairs; epochs: {config.epochs}"),
            ("Training time", f"{metrics[-1]['seconds']:.0f} s, validations included"),
            ("Processor", processor_name()),
            ("Software", f"itm_fast {itm_fast.__version__}, torch {torch.__version__}, "
                         f"Python {platform.python_version()}"),
            ("Seed", str(config.seed)),
        ],
        split=split,
        credits="",
        note=model.attention_note,
        **searches(model, dataset, scores, config.seed, lambda number: _picture(dataset, number), names),
    )  # fmt: skip
    write_report(path, report)


def searches(
    model: MatchingModel,
    dataset: PrecomputedDataset,
    scores: Tensor,
    seed: int,
    picture: Callable[[int], np.ndarray | None],
    names: list[str],
) -> dict[str, Any]:
    """Return the entries of a `Report` about searches and attention, for captions and images drawn by `seed`.

    Args:
        scores: (n_images, n_captions).
        picture: returns the pixels of an image.
        names: a short description of each image.
    """
    chosen = random.Random(seed)
    captions, images = range(len(dataset)), range(dataset.n_images)
    text_queries = [
        text_query(scores, dataset.caption_image, dataset.captions, caption, HITS)
        for caption in chosen.sample(captions, min(QUERIES, len(captions)))
    ]
    image_queries = [
        image_query(scores, dataset.caption_image, image, HITS)
        for image in chosen.sample(images, min(QUERIES, len(images)))
    ]
    attention = _attention(model, dataset, chosen.sample(captions, min(ATTENTION, len(captions))))
    shown = {hit.item for query in text_queries for hit in query.hits} | {query.picture for query in image_queries}
    shown |= {example.picture for example in attention}
    return {
        "pictures": {index: picture(index) for index in sorted(shown)},
        "names": {index: names[index] for index in sorted(shown)},
        "captions": dataset.captions,
        "text_queries": text_queries,
        "image_queries": image_queries,
        "attention": attention,
        "n_images": dataset.n_images,
        "n_captions": len(dataset),
        "top": HITS,
    }


def _attention(model: MatchingModel, dataset: PrecomputedDataset, captions: list[int]) -> list[WordAttention]:
    """Return the attention of each word of these captions over its picture; none if words do not attend to regions."""
    try:
        weights = evaluation.word_attention(model, dataset, torch.tensor(captions))
    except ValueError:
        return []
    examples = []
    for caption, rows in zip(captions, weights, strict=True):
        text, image = dataset.captions[caption], int(dataset.caption_image[caption])
        inner = dataset.vocabulary.inner
        words, attended = dataset.vocabulary.pieces(text)[inner], rows[inner]
        if dataset.box_source is not None:
            boxes = dataset.boxes([image])[0].numpy()
            examples.append(WordAttention(text, image, words, attended.numpy(), boxes))
            continue
        # A class token, if there is one, comes before the square grid of the patches.
        side = math.isqrt(attended.shape[1])
        grids = attended[:, attended.shape[1] - side * side :].reshape(-1, side, side).numpy()
        examples.append(WordAttention(text, image, words, grids))
    return examples


def _picture(dataset: PrecomputedDataset, image: int) -> np.ndarray | None:
    """Return the pixels of an image, uint8 (height, width, 3); None if only features are known."""
    if dataset.box_source is not None:
        return whole_picture_of(dataset, image)
    found, _ = picture_of(dataset, image)
    return found if found is not None else emoji.picture_if_patches(dataset.region_batch([image])[0].numpy())
