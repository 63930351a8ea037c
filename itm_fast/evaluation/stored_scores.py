"""Scores of models in a temporary file, for protocols that read all scores of a query.

Inside: `scores_on_disk`.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.distributed import World
from itm_fast.evaluation.score_sources import MatrixScores
from itm_fast.evaluation.scoring import Gallery, Scorer, check_tiles
from itm_fast.evaluation.shares import encoded_tiles, gathered_scores
from itm_fast.evaluation.streaming import CHUNK_CAPTIONS, Member, evaluation_modes

__all__ = ["scores_on_disk"]


@contextlib.contextmanager
def scores_on_disk(
    members: Sequence[tuple[Scorer, Gallery]],
    *,
    tile_images: int = 256,
    tile_captions: int = 512,
    chunk_captions: int = CHUNK_CAPTIONS,
    progress: bool = False,
    description: str = "scores",
    world: World | None = None,
) -> Iterator[MatrixScores | None]:
    """Score all pairs once, and give a block the sum of the models' scores as a source of tiles.

    Memory holds one chunk of encoded captions, one tile of encoded images, and the scores between them. The file takes
    `4 * n_images * n_captions` bytes (8 for a model in float64) in the temporary folder of the system, which `TMPDIR`
    sets. It has no name and disappears with the block or the process.

    Args:
        members: each model with its data set, as in `evaluate_ensemble`.
        tile_images: images encoded at a time.
        tile_captions: captions encoded at a time.
        chunk_captions: encoded captions in memory.
        progress: show a progress bar if stderr is a terminal.
        description: label of the progress bar.
        world: the processes that share the work; None: only this one. The block of the first one gets the source, the
            others get None.

    Raises:
        ValueError: a tile size is below 1.
        OSError: the disk has too little space.
    """
    check_tiles(tile_images, tile_captions)
    world = world or World()
    dataset = members[0][1]
    shape = dataset.n_images, len(dataset)
    parts = [Member(*member) for member in members]
    chunks = torch.arange(shape[1]).split(max(chunk_captions, 1))
    blocks = torch.arange(shape[0]).split(tile_images * world.size)
    array: np.memmap | None = None
    with evaluation_modes(parts), tqdm(
        total=len(chunks) * len(blocks), desc=description, unit="tile", leave=False, disable=None if progress else True
    ) as bar:  # fmt: skip
        for captions in chunks:
            encoded = [encoded_tiles(part.encode_captions, captions, tile_captions, world) for part in parts]
            for images in blocks:
                with world.together():
                    own = _scores(parts, images[world.share(len(images))], encoded)
                scores = gathered_scores(own, len(images), len(captions), world)
                with world.together():
                    if world.first:
                        scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
                        array = _temporary_array(shape, scores.numpy().dtype) if array is None else array
                        row, column = int(images[0]), int(captions[0])
                        array[row : row + len(images), column : column + len(captions)] = scores.numpy()
                bar.update()
    yield None if array is None else MatrixScores(array)


def _scores(parts: Sequence[Member], images: Tensor, encoded: Sequence[Sequence[Any]]) -> Tensor | None:
    """Return the sum of the models' scores of images with encoded captions; None without images."""
    total: Tensor | None = None
    for part, tiles in zip(parts, encoded, strict=True) if len(images) else ():
        query = part.encode_images(images)
        scores = torch.cat([part.model.score(query, tile).cpu() for tile in tiles], dim=1)
        total = scores if total is None else total + scores
    return total


def _temporary_array(shape: tuple[int, int], dtype: np.dtype[Any]) -> np.memmap:
    """Map an array of zeros from a file without a name.

    Raises:
        OSError: the disk has too little space.
    """
    size = math.prod(shape) * dtype.itemsize
    with tempfile.TemporaryFile() as file:
        try:
            # Without reserved space, writing to a mapped file on a full disk kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape)
        except OSError as error:
            raise OSError(
                f"{tempfile.gettempdir()}: cannot keep {size:,} bytes of scores: {error.strerror}; set TMPDIR to a "
                "folder with more space, or leave out --streaming"
            ) from None
