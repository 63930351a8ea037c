"""Plausible matches (PMRP): pairs match plausibly if their images show nearly the same classes of objects.

Inside: `read_classes`, `plausible_precision`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from itm_fast.evaluation.many_positives import query_blocks, r_precision
from itm_fast.evaluation.score_sources import ScoreSource
from itm_fast.files.documents import read_text

__all__ = ["plausible_precision", "read_classes"]

# instances_val2014.json of COCO has 160 MB.
_MAX_BYTES = 2**30
# Images match plausibly if their classes differ in at most this many.
_DIFFERENCES = (0, 1, 2)


def read_classes(path: Path, image_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Read which classes of objects images show from COCO's `instances_val2014.json`.

    Args:
        path: the file.
        image_ids: COCO numbers of the images, `(n_images,)`.

    Returns:
        `(n_images, n_classes)`; a row without classes is an image without annotations.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or annotates none of the images.
    """
    text = read_text(path, _MAX_BYTES, "utf-8-sig")
    try:
        content = json.loads(text, object_pairs_hook=_without_outlines)
        pairs = [(int(one["image_id"]), int(one["category_id"])) for one in content["annotations"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path}: expected the object annotations of COCO, such as instances_val2014.json") from None
    places = {number: place for place, number in enumerate(image_ids.tolist())}
    columns = {number: column for column, number in enumerate(sorted({category for _, category in pairs}))}
    classes = np.zeros((len(image_ids), len(columns)), dtype=bool)
    for image, category in pairs:
        if image in places:
            classes[places[image], columns[category]] = True
    if not classes.any():
        raise ValueError(f"{path}: annotates none of the {len(image_ids):,} images: annotations of another split?")
    return classes


def _without_outlines(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object without the outlines of COCO's objects, which take most of the memory."""
    return {name: value for name, value in pairs if name not in ("segmentation", "bbox")}


def plausible_precision(
    source: ScoreSource,
    caption_image: Tensor,
    classes: npt.NDArray[np.bool_],
    direction: str,
    *,
    images: Tensor,
    captions: Tensor,
    progress: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the plausible-match R-Precision of each query in percent: the mean over 0, 1 and 2 differing classes.

    Images without annotations, and their captions, are neither queries nor candidates. Images without captions are no
    queries.

    Args:
        source: the scores.
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        classes: the classes of each image, `(n_images, n_classes)`.
        direction: "i2t" or "t2i".
        images: indices of the images of a fold.
        captions: indices of their captions.
        progress: show a progress bar if stderr is a terminal.

    Returns:
        The image of each query, `(q,)`, and its value, `(q,)`.

    Source: Chun et al., Probabilistic Embeddings for Cross-Modal Retrieval, section 4.1.
    """
    labels = torch.from_numpy(classes)
    shown = labels.any(1)
    images = images[shown[images]]
    captions = captions[shown[caption_image[captions]]]
    if not len(captions):
        raise ValueError("images: expected at least one with annotations and captions in each fold")
    of_images = direction == "i2t"
    described = images[torch.isin(images, caption_image[captions])]
    queries, candidates = (described, captions) if of_images else (captions, images)
    owners = queries if of_images else caption_image[queries]
    others = caption_image[candidates] if of_images else candidates
    sizes = labels.sum(1)
    numbers = labels.float()
    found = []
    blocks = query_blocks(
        source, queries.numpy(), direction, candidates=candidates, progress=progress, description="pmrp"
    )
    for start, scores in blocks:
        own = owners[start : start + len(scores)]
        common = numbers[own] @ numbers[others].t()
        differing = sizes[own][:, None] + sizes[others] - 2 * common.long()
        precisions = [r_precision(scores, differing <= most) for most in _DIFFERENCES]
        found.append(torch.stack(precisions).mean(0))
    values = torch.cat(found).numpy() if found else np.zeros(0)
    return owners.numpy(), 100.0 * values
