"""What several processes do of one evaluation: each encodes some captions and scores some images.

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
    """Tiles of `size` indices; no indices make no tile."""
    return list(indices.split(size)) if len(indices) else []


def encoded_tiles(encode: Callable[[Tensor], Any], captions: Tensor, size: int, world: World) -> list[Any]:
    """What `encode` makes of tiles of `size` of the captions, in all processes.

    Each encodes its share, where embeddings are Fragments or tensors; what else a model makes of captions, each makes
    of all.
    """
    tiles = split_tiles(captions, size)
    if world.size == 1 or not tiles:
        return [encode(tile) for tile in tiles]
    own = split_tiles(captions[world.share(len(captions))], size)
    with world.together():
        # Without a share of its own a process must still know what embeddings look like.
        parts = [encode(tile) for tile in own] or [none_of(encode(captions[:1]))]
    if not isinstance(parts[0], Fragments | Tensor):
        with world.together():
            return [encode(tile) for tile in tiles]
    joined: Any = Fragments.cat(parts) if isinstance(parts[0], Fragments) else torch.cat(parts)
    whole = gather_sets(joined, world.counts(len(captions)), world)
    return [_part(whole, first, min(first + size, len(captions))) for first in range(0, len(captions), size)]


def gathered_scores(own: Tensor | None, n_images: int, n_captions: int, world: World) -> Tensor:
    """The scores (n_images, n_captions) whose rows are those of each process; None: it has none."""
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
    start, end = int(offsets[0]), int(offsets[-1])
    return Fragments(sets.values[start:end], offsets - offsets[0], check=False)
