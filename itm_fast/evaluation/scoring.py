"""Scores of a whole split: every image and caption is encoded once, pairs are scored tile by tile.

Inside: `score_matrix`, and what it asks of a model (`Scorer`) and of a data set (`Gallery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from itm_fast.distributed import World
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.evaluation.shares import encoded_tiles, gathered_scores, split_tiles
from itm_fast.fragments import Fragments

__all__ = ["Gallery", "Scorer", "check_tiles", "evaluation_mode", "score_matrix"]


class Gallery(Protocol):
    """Images and captions to retrieve from; `itm_fast.data.PrecomputedDataset` is one."""

    caption_image: Tensor  # (n_captions,) int64
    n_images: int

    def __len__(self) -> int: ...
    def image_batch(self, image_indices: Tensor, /) -> Tensor | Fragments: ...
    def caption_batch(self, caption_indices: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Scorer(Protocol):
    """A model that encodes both sides once and scores all pairs; every model of `itm_fast.models` is one."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def encode_images(self, features: Any, /) -> Any: ...
    def encode_captions(self, token_ids: Tensor, lengths: Tensor, /) -> Any: ...
    def score(self, images: Any, captions: Any, /) -> Tensor: ...


def score_matrix(
    model: Scorer,
    dataset: Gallery,
    *,
    images: Tensor | None = None,
    captions: Tensor | None = None,
    tile_images: int = 256,
    tile_captions: int = 512,
    progress: bool = False,
    description: str = "scores",
    distance: MeanDistance | None = None,
    world: World | None = None,
) -> Tensor:
    """Scores of all images with all captions of a split, or of chosen ones.

    The model runs in evaluation mode without gradients, on the device of its parameters; its mode is put back
    afterwards. What lives at a time is the encoded gallery, one tile of scores, and the result.

    Args:
        model: encodes and scores, such as a model of `itm_fast.models`.
        dataset: the gallery, such as `itm_fast.data.PrecomputedDataset`.
        images: indices of the images to score, int64 `(n,)`; None: all.
        captions: indices of the captions to score, int64 `(m,)`; None: all.
        tile_images: images encoded together, and rows of a tile.
        tile_captions: captions encoded together, and columns of a tile.
        progress: show a progress bar where there is a terminal; it vanishes at the end.
        description: stands before the bar.
        distance: takes every tile as it is scored.
        world: the processes that share the work, each the encoding of some captions and the scores of some images; all
            have the result, which is that of one process but for the rounding of other tiles. None: this one alone.

    Returns:
        `(n, m)` float32 (float64 from a model in float64) on the CPU.

    Raises:
        ValueError: a tile size is below 1, or what the data set raises for bad features.
    """
    check_tiles(tile_images, tile_captions)
    world = world or World()
    images = torch.arange(dataset.n_images) if images is None else images
    captions = torch.arange(len(dataset)) if captions is None else captions
    own_images = images[world.share(len(images))]
    image_tiles = split_tiles(own_images, tile_images)
    n_columns = len(split_tiles(captions, tile_captions))
    n_encoded = len(split_tiles(captions[world.share(len(captions))], tile_captions))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    steps = len(image_tiles) + n_encoded + len(image_tiles) * n_columns
    scores: Tensor | None = None
    with evaluation_mode(model), _bar(steps, description, progress) as bar:

        def encode(chosen: Tensor) -> Any:
            token_ids, lengths = dataset.caption_batch(chosen)
            encoded = model.encode_captions(token_ids.to(device), lengths.to(device))
            bar.update()
            return encoded

        encoded_captions = encoded_tiles(encode, captions, tile_captions, world)
        row = 0
        with world.together():
            for chosen in image_tiles:
                encoded_images = model.encode_images(dataset.image_batch(chosen).to(device))
                bar.update()
                column = 0
                for encoded in encoded_captions:
                    tile = model.score(encoded_images, encoded)
                    if scores is None:
                        scores = torch.empty(len(own_images), len(captions), dtype=tile.dtype)
                    place = scores[row : row + tile.shape[0], column : column + tile.shape[1]]
                    place.copy_(tile)
                    if distance is not None:
                        owners = dataset.caption_image[captions[column : column + tile.shape[1]]]
                        distance.add(place, chosen[:, None] == owners)
                    column += tile.shape[1]
                    bar.update()
                row += len(chosen)
    if distance is not None:
        distance.add_others(world)
    return gathered_scores(scores, len(images), len(captions), world)


def check_tiles(tile_images: int, tile_captions: int) -> None:
    """Raises ValueError where a tile has no images or no captions."""
    for name, size in (("tile_images", tile_images), ("tile_captions", tile_captions)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def _bar(steps: int, description: str, progress: bool) -> Any:
    return tqdm(total=steps, desc=description, unit="tile", leave=False, disable=None if progress else True)


@contextlib.contextmanager
def evaluation_mode(model: Scorer) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is back in its own mode, frozen parts included."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
