"""Score a whole split: encode every image and caption once, then score pairs tile by tile.

Inside: `score_matrix`, and the protocols of its model (`Scorer`) and data set (`Gallery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from itm_fast.distributed import World
from itm_fast.evaluation.distance import MeanDistance
from itm_fast.evaluation.shares import encoded_tiles, gathered_scores, split_tiles
from itm_fast.files.messages import shown

__all__ = ["Gallery", "Scorer", "check_gallery", "check_tiles", "evaluation_mode", "score_matrix"]


class Gallery(Protocol):
    """Images and captions to retrieve, such as `itm_fast.data.PrecomputedDataset`."""

    caption_image: Tensor  # (n_captions,) int64
    n_images: int

    def __len__(self) -> int: ...
    def image_batch(self, image_indices: Tensor, /) -> Any: ...  # What `encode_images` takes.
    def caption_batch(self, caption_indices: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Scorer(Protocol):
    """A model that encodes images and captions separately and scores all pairs, such as those of `itm_fast.models`."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def encode_images(self, features: Any, /) -> Any: ...
    def encode_captions(self, token_ids: Tensor, lengths: Tensor, /) -> Any: ...
    def score(self, images: Any, captions: Any, /) -> Tensor: ...


def check_gallery(dataset: object) -> None:
    """Raise TypeError if it is no data set."""
    for name in ("n_images", "caption_image", "image_batch", "caption_batch", "__len__"):
        if not hasattr(dataset, name):
            hint = "; open a folder with itm_fast.data.open_split" if isinstance(dataset, str | Path) else ""
            raise TypeError(f"dataset: expected a data set, got {shown(dataset)}, which has no {name}{hint}")


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
    """Score all images against all captions of a split, or chosen ones.

    The model runs in evaluation mode without gradients, on the device of its parameters; its mode is restored
    afterwards. Memory holds the encoded captions, one tile of encoded images and scores, and the result.

    Args:
        model: the model, such as one of `itm_fast.models`.
        dataset: the gallery, such as `itm_fast.data.PrecomputedDataset`.
        images: indices of the images to score, int64 `(n,)`; None: all.
        captions: indices of the captions to score, int64 `(m,)`; None: all.
        tile_images: images encoded at a time, and rows of a tile.
        tile_captions: captions encoded at a time, and columns of a tile.
        progress: show a progress bar if stderr is a terminal; it disappears at the end.
        description: label of the progress bar.
        distance: accumulates the scores of all tiles.
        world: the processes that share the work; None: only this one. Each encodes a share of the captions and scores a
            share of the images, and all get the result. It may differ from the result of one process by rounding,
            because the tiles differ.

    Returns:
        `(n, m)` float32 (float64 from a model in float64) on the CPU.

    Raises:
        TypeError: `dataset` is no data set.
        ValueError: a tile size is below 1, or the data set finds bad features.
    """
    check_gallery(dataset)
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
    """Raise ValueError if a tile size is below 1."""
    for name, size in (("tile_images", tile_images), ("tile_captions", tile_captions)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def _bar(steps: int, description: str, progress: bool) -> Any:
    return tqdm(total=steps, desc=description, unit="tile", leave=False, disable=None if progress else True)


@contextlib.contextmanager
def evaluation_mode(model: Scorer) -> Iterator[None]:
    """Run a block in evaluation mode without gradients, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
