"""Read the batches of a run in order, from any step on.

Inside: `read_batches`, `picture_augmentation`.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

import torch

from itm_fast.data import Batch, BatchLoader, EpochSampler, PrecomputedDataset
from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.data.zeros import warn_of_zeros
from itm_fast.distributed import World
from itm_fast.training.config import TrainConfig
from itm_fast.training.own import OwnData, SeededData
from itm_fast.training.phases import Phases
from itm_fast.training.shares import Shares, shared

__all__ = ["picture_augmentation", "read_batches"]


def picture_augmentation(config: TrainConfig, epoch: int) -> PictureAugmentation | None:
    """Return how the stored pictures of an epoch are changed; None if they are not."""
    if config.picture_augmentation == "none":
        return None
    return PictureAugmentation(config.seed, epoch, config.crop_area, config.picture_augmentation == "crop_flip")


def read_batches(
    config: TrainConfig,
    data: PrecomputedDataset | OwnData,
    phases: Phases,
    position: int,
    *,
    world: World,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """Yield this process's part of the batches from step `position` on, epoch after epoch, without end.

    Args:
        config: the settings of the run.
        data: the training split.
        phases: the batch of each step.
        position: the first step, from 0.
        world: the processes that share each batch.
        pin_memory: read into page-locked memory.

    Raises:
        ValueError: a row cannot be read, or has a value that is not finite.
    """
    # Only features of regions are known to be no padding.
    checked = not world.first or isinstance(data, OwnData)
    for part in phases.passes(position):
        sampler = EpochSampler(
            len(data),
            config.batch_size,
            seed=config.seed,
            epoch=part.order,
            drop_last=config.drop_last,
            start_batch=part.start,
            lengths=data.caption_lengths.numpy() if config.bucket_batches else None,
            bucket_batches=config.bucket_batches,
        )
        own = sampler if world.size == 1 else Shares(sampler, world)
        augmentation = picture_augmentation(config, part.order)
        read = SeededData(data, config.seed, part.order) if isinstance(data, OwnData) else data
        loader = BatchLoader(read, own, workers=config.workers, pin_memory=pin_memory, augmentation=augmentation)
        # A loader draws a seed for its workers from torch's generator, which dropout draws from, too.
        with torch.random.fork_rng(devices=[]):
            batches = shared(loader, sampler, data.caption_image, world)
            first = next(batches)
        if not checked and isinstance(data, PrecomputedDataset):
            warn_of_zeros(data, first)
            checked = True
        yield from itertools.repeat(first, part.repeats - part.done)
        del first  # Its memory is that of another batch.
        for batch in batches:
            yield from itertools.repeat(batch, part.repeats)
