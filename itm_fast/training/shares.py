"""Which part of each batch a process reads, where several train together.

The order of the data is that of one process: each takes a run of consecutive items of each batch of the one sampler.

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
    """The own part of a batch that several processes share.

    Attributes:
        all_images: (B,) int64, `image_index` of the whole batch.
        counts: how many items of it each process has; where this one has none, the first item of the batch stands in,
            so that there is something to run the model on, and counts nowhere.
    """

    all_images: Tensor
    counts: tuple[int, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SharedBatch:
        own = super().to(device, non_blocking)
        return _shared(own, self.all_images.to(device, non_blocking=non_blocking), self.counts)


class Shares:
    """The own part of each of `batches` of indices, or the first item of a batch of which the process has none."""

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
    """What was read by `Shares(batches, world)`, beside what each process knows of the whole batch."""
    if world.size == 1:
        yield from parts
        return
    for part, indices in zip(parts, batches, strict=True):
        yield _shared(part, caption_image[torch.from_numpy(indices)], tuple(world.counts(len(indices))))


def images_of(batch: Batch) -> Tensor:
    """(B,) int64, the images of the whole batch."""
    return batch.all_images if isinstance(batch, SharedBatch) else batch.image_index


def _shared(own: Batch, all_images: Tensor, counts: tuple[int, ...]) -> SharedBatch:
    return SharedBatch(own.features, own.token_ids, own.lengths, own.image_index, own.caption_index, all_images, counts)
