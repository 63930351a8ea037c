"""Distribute an evaluation: each process encodes a share of the captions and scores a share of the images.

Inside: `split_tiles`, `encoded_tiles`, `gathered_scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from itm_fast.distributed import World, gather_rows, gather_sets, none_of
from itm_fast.fragments import Fragments

__all__ = ["encoded_tiles", "gathered_scores", "split_tiles"]


def split_tiles(indices: Tensor, size: int) -> list[Tensor]:
    """Split indices into tiles of `size`; return an empty list for no indices."""
    return list(indices.split(size)) if len(indices) else []


def encoded_tiles(encode: Callable[[Tensor], Any], captions: Tensor, size: int, world: World) -> list[Any]:
    """Encode captions in tiles of `size`; every process gets all tiles.

    If embeddings are Fragments or tensors, each process encodes its share and gathers the others. Any other type cannot
    be gathered, so each process encodes all captions.

    Args:
        encode: function from caption indices, int64 `(k,)`, to their embeddings.
        captions: indices of the captions, int64 `(m,)`.
        size: captions in a tile.
        world: the processes.
    """
    tiles = split_tiles(captions, size)
    if world.size == 1 or not tiles:
        return [encode(tile) for tile in tiles]
    own = split_tiles(captions[world.share(len(captions))], size)
    with world.together():
        # A process with an empty share still needs the type and shape of embeddings.
        parts = [encode(tile) for tile in own] or [none_of(encode(captions[:1]))]
    if not isinstance(parts[0], Fragments | Tensor):
        with world.together():
            return [encode(tile) for tile in tiles]
    joined: Any = Fragments.cat(parts) if isinstance(parts[0], Fragments) else torch.cat(parts)
    whole = gather_sets(joined, world.counts(len(captions)), world)
    return [_part(whole, first, min(first + size, len(captions))) for first in range(0, len(captions), size)]


def gathered_scores(own: Tensor | None, n_images: int, n_captions: int, world: World) -> Tensor:
    """Gather the rows of all processes.

    Args:
        own: rows of this process; None if it has none.
        n_images: number of images of all processes.
        n_captions: number of captions.
        world: the processes.

    Returns:
        Scores `(n_images, n_captions)` in the order of the ranks.
    """
    if world.size == 1:
        return torch.empty(n_images, n_captions) if own is None else own
    dtypes = [dtype for dtype in world.objects(None if own is None else own.dtype) if dtype is not None]
    if own is None:
        own = torch.empty(0, n_captions, dtype=dtypes[0] if dtypes else torch.float32)
    return gather_rows(own, world.counts(n_images), world)


def _part(sets: Fragments | Tensor, first: int, last: int) -> Fragments | Tensor:
    if isinstance(sets, Tensor):
        return sets[first:last]
    offsets = sets.offsets[first : last + 1]
    start, end, longest = int(offsets[0]), int(offsets[-1]), int(offsets.diff().max())
    return Fragments(sets.values[start:end], offsets - offsets[0], check=False, max_length=longest)
