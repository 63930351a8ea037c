"""Which captions form a batch, and fetching batches ahead.

Inside: `EpochSampler`, `BatchLoader`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .dataset import Batch, CaptionDataset


class EpochSampler:
    """Index batches of one epoch, a function of (seed, epoch) alone, so that a run can resume in mid-epoch.

    Args:
        n: number of items. batch_size: items per batch. seed, epoch: non-negative integers.
        shuffle: False gives the items in order.
        drop_last: leaves a last batch of fewer items out.
        start_batch: leaves the first batches out; the others are those of the whole epoch.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        start_batch: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        for name, value in (("n", n), ("seed", seed), ("epoch", epoch), ("start_batch", start_batch)):
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        self.n, self.batch_size, self.seed, self.epoch = n, batch_size, seed, epoch
        self.shuffle, self.drop_last, self.start_batch = shuffle, drop_last, start_batch

    def _n_batches(self) -> int:
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def __len__(self) -> int:
        return max(self._n_batches() - self.start_batch, 0)

    def __iter__(self) -> Iterator[np.ndarray]:
        # SeedSequence mixes the pair, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch])))
        order = random.permutation(self.n) if self.shuffle else np.arange(self.n)
        for batch in range(self.start_batch, self._n_batches()):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


class _Batches(Dataset[Batch | ValueError]):
    def __init__(self, dataset: CaptionDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, indices: np.ndarray) -> Batch | ValueError:
        # A worker process would hand on an exception with its whole traceback as the message. As a value it arrives
        # as it is, and is raised in the process that trains.
        try:
            return self.dataset.batch(indices)
        except ValueError as error:
            return error


def _as_it_is(item: Batch | ValueError) -> Batch | ValueError:
    return item


def _leave_interrupts_to_the_main_process(_worker: int) -> None:
    # Ctrl-C reaches every process of a terminal. The training process may want to finish its step first, and ends its
    # workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class BatchLoader:
    """Iterates over the batches of `dataset` that `index_batches` names, in that order.

    `workers=0` reads in this process; more read ahead in worker processes, which pays where batches come from a disk
    and the training step runs on another device. `pin_memory=True` makes copies to a GPU asynchronous.
    Raises what `CaptionDataset.batch` raises.
    """

    def __init__(
        self,
        dataset: CaptionDataset,
        index_batches: Sequence[np.ndarray] | Iterable[np.ndarray],
        *,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._index_batches = index_batches
        self._loader: DataLoader[Batch | ValueError] = DataLoader(
            _Batches(dataset),
            sampler=index_batches,
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=workers,
            worker_init_fn=_leave_interrupts_to_the_main_process,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )

    def __len__(self) -> int:
        return len(self._index_batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        for item in self._loader:
            if isinstance(item, ValueError):
                raise item
            yield item
