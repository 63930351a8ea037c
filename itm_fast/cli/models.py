"""Load trained models and their data for commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from itm_fast.files import regular

if TYPE_CHECKING:
    import numpy as np
    import torch

    from itm_fast.data import PrecomputedDataset, Vocabulary
    from itm_fast.models import MatchingModel

__all__ = ["check_run", "dataset_of", "find_picture", "load_run"]


def check_run(run: Path) -> None:
    """Raise ValueError if there is no run directory `run`, or a file in its place."""
    if not run.is_dir():
        found = "expected a run directory, found a file" if run.exists() else "no such run directory"
        raise ValueError(f"{run}: {found}")


def load_run(run: Path, device: torch.device, vocab: Path | None) -> tuple[MatchingModel, Vocabulary, Path]:
    """Return the model in `run`, its vocabulary, and the path of the vocabulary file."""
    from itm_fast import models
    from itm_fast.data import Vocabulary
    from itm_fast.training import run_folder

    model = models.load(run, device)
    own = run / run_folder.VOCABULARY
    path = vocab or own
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such vocabulary file; pass the vocabulary of the training with --vocab FILE")
    vocabulary = Vocabulary.from_file(path)
    expected = getattr(model.encoder_config, "vocab_size", len(vocabulary))
    if len(vocabulary) != expected:
        raise ValueError(f"{path}: {len(vocabulary)} words, but the model in {run} knows {expected}")
    if regular.is_present(own) and Vocabulary.from_file(own) != vocabulary:
        raise ValueError(f"{path}: not the vocabulary that the model was trained with, {own}")
    return model, vocabulary, path


def dataset_of(
    data: Path,
    split: str,
    vocabulary: Vocabulary,
    model: MatchingModel,
    run: Path,
    known: Sequence[PrecomputedDataset] = (),
) -> PrecomputedDataset:
    """Return the split as the model of `run` sees it. One of `known` that gives the same batches is reused."""
    from itm_fast.data import open_split
    from itm_fast.data.picture_shards import StoredPictures

    read = (model.reads_tags, model.reads_boxes)
    fits = (one for one in known if one.vocabulary == vocabulary and (one.reads_tags, one.reads_boxes) == read)
    dataset = next(fits, None)
    if dataset is None:
        dataset = open_split(data, split, vocabulary)
        model.prepare(dataset)
    width = int(dataset.features.shape[2])
    expected = getattr(model.encoder_config, "feature_dim", width)
    if width != expected:
        found = f"regions have {width} channels, but the model in {run} needs {expected}"
        if isinstance(dataset.features, StoredPictures):
            own, wanted = (math.isqrt(one // 3) for one in (width, expected))
            found = (
                f"pictures are cut into patches of {own} x {own} pixels, but the model in {run} reads patches of "
                f"{wanted} x {wanted}; import them with a --size of {wanted} times --grid"
            )
        raise ValueError(f"{dataset.features_path}: {found}")
    dataset.check_caption_lengths(model.max_caption_length)
    return dataset


def find_picture(
    dataset: PrecomputedDataset, image: int, grid_side: int | None = None
) -> tuple[np.ndarray | None, tuple[int, int], str]:
    """Return the picture of an image, the rows and columns of its patches, and its credits if it is a bundled emoji.

    The picture is None if the features are not pixels. `grid_side`: patches per side, if not those of the data.
    """
    from itm_fast.data import emoji, picture_of

    features = dataset.region_batch([image])
    picture = emoji.picture_if_patches(features[0].numpy())
    if picture is not None and grid_side is None:
        return picture, (emoji.GRID, emoji.GRID), emoji.CREDITS if emoji.is_bundled(picture) else ""
    picture, grid = picture_of(dataset, image, grid_side)
    return picture, (grid, grid), ""
