"""The part of each batch that a process reads if several train together.

The data order is that of a single process: each process takes consecutive items of each batch of the same sampler.

Inside: `SharedBatch`, `Shares`, `shared`, `images_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.data import Batch
from itm_fast.distributed import World

__all__ = ["SharedBatch", "Shares", "images_of", "shared"]


@attrs.frozen(eq=False)
class SharedBatch(Batch):
    """This process's part of a batch that several processes share.

    Attributes:
        all_images: (B,) int64, `image_index` of the whole batch.
        counts: number of items of each process. A process without items runs the model on the first item of the batch,
            which is not counted.
    """

    all_images: Tensor
    counts: tuple[int, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SharedBatch:
        own = super().to(device, non_blocking)
        return _shared(own, self.all_images.to(device, non_blocking=non_blocking), self.counts)


class Shares:
    """This process's part of each of `batches` of indices, or the first item of a batch if it has no part."""

    def __init__(self, batches: Iterable[np.ndarray], world: World) -> None:
        self.batches, self.world = batches, world

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[np.ndarray]:
        for indices in self.batches:
            own = indices[self.world.share(len(indices))]
            yield own if len(own) else indices[:1]


def shared(
    parts: Iterable[Batch], batches: Iterable[np.ndarray], caption_image: Tensor, world: World
) -> Iterator[Batch]:
    """Wrap the batches read by `Shares(batches, world)` with what every process knows about the whole batch."""
    if world.size == 1:
        yield from parts
        return
    for part, indices in zip(parts, batches, strict=True):
        yield _shared(part, caption_image[torch.from_numpy(indices)], tuple(world.counts(len(indices))))


def images_of(batch: Batch) -> Tensor:
    """Return the images of the whole batch, (B,) int64."""
    return batch.all_images if isinstance(batch, SharedBatch) else batch.image_index


def _shared(own: Batch, all_images: Tensor, counts: tuple[int, ...]) -> SharedBatch:
    return SharedBatch(own.features, own.token_ids, own.lengths, own.image_index, own.caption_index, all_images, counts)
