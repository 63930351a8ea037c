"""Choose the captions of each batch, and read batches ahead of the training step.

Inside: `EpochSampler`, `BatchLoader`.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from itm_fast.data.dataset import Batch
from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.files.processors import check_count

# Batches to read ahead of the current one.
_AHEAD = 2
# macOS does not tell who sent a signal.
_SAYS_WHO = hasattr(signal, "sigtimedwait")
# How often a worker checks that the training process still runs.
_CHECK_SECONDS = 1.0


class EpochSampler:
    """Index batches of one epoch. They depend only on seed and epoch, so a run can resume within an epoch.

    Args:
        n: number of items.
        batch_size: items per batch.
        seed, epoch: non-negative integers.
        shuffle: False keeps the order of the items.
        drop_last: drop the last batch if it is not full.
        start_batch: skip this many batches; the others do not change.
        lengths: (n,) the length of each item; required with `bucket_batches`.
        bucket_batches: sort items by length within groups of this many batches, then shuffle the batches (length
            bucketing). A batch that is not full stays the last. 0: off.

    Raises:
        ValueError: an argument is out of range.
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
        lengths: np.ndarray | None = None,
        bucket_batches: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        numbers = {"n": n, "seed": seed, "epoch": epoch, "start_batch": start_batch, "bucket_batches": bucket_batches}
        for name, value in numbers.items():
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        if bucket_batches and (lengths is None or lengths.shape != (n,)):
            found = None if lengths is None else lengths.shape
            raise ValueError(f"lengths: expected shape ({n},) with bucket_batches, got {found}")
        self.n, self.batch_size, self.seed, self.epoch = n, batch_size, seed, epoch
        self.shuffle, self.drop_last, self.start_batch = shuffle, drop_last, start_batch
        self.lengths, self.bucket_batches = lengths, bucket_batches

    def _n_batches(self) -> int:
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def __len__(self) -> int:
        return max(self._n_batches() - self.start_batch, 0)

    def __iter__(self) -> Iterator[np.ndarray]:
        # SeedSequence mixes the pair, so (seed, epoch + 1) and (seed + 1, epoch) give unrelated orders.
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch])))
        order = random.permutation(self.n) if self.shuffle else np.arange(self.n)
        if self.bucket_batches and self.lengths is not None:
            order = self._bucketed(order, self.lengths, random)
        for batch in range(self.start_batch, self._n_batches()):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _bucketed(self, order: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        full = self.n // self.batch_size * self.batch_size
        size = self.bucket_batches * self.batch_size
        # A stable sort keeps items of one length in their random order.
        windows = [order[start : start + size] for start in range(0, full, size)]
        windows[-1:] = [window[: full - size * (len(windows) - 1)] for window in windows[-1:]]
        ordered = [window[np.argsort(lengths[window], kind="stable")] for window in windows]
        batches = np.concatenate([*ordered, order[:0]]).reshape(-1, self.batch_size)
        if self.shuffle:
            batches = batches[random.permutation(len(batches))]
        return np.concatenate([batches.reshape(-1), order[full:]])


class Batched(Protocol):
    """A data set that makes batches, such as `CaptionDataset`."""

    source: Any  # `Features`, or what has their `in_process`.

    @property
    def batch(self) -> Callable[..., Batch]: ...  # As `CaptionDataset.batch`.


def _batch_of(dataset: Batched, indices: np.ndarray, augmentation: PictureAugmentation | None) -> Batch:
    # Data sets of other kinds need not know of augmentation.
    return dataset.batch(indices) if augmentation is None else dataset.batch(indices, augmentation)


class _Batches(Dataset[Batch | ValueError]):
    def __init__(self, dataset: Batched, augmentation: PictureAugmentation | None) -> None:
        self.dataset, self.augmentation = dataset, augmentation

    def __getitem__(self, indices: np.ndarray) -> Batch | ValueError:
        # A worker process would pass on an exception with its whole traceback as the message. Passed as a value, the
        # exception does not change, and the training process raises it.
        try:
            return _batch_of(self.dataset, indices, self.augmentation)
        except ValueError as error:
            return error


def _as_it_is(item: Batch | ValueError) -> Batch | ValueError:
    return item


def _follow_main_process(_worker: int) -> None:
    # Ctrl-C reaches every process of a terminal, and a SIGTERM from torchrun, timeout or a batch system reaches every
    # process of a job. The training process may finish its step first, so it ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _SAYS_WHO:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(main: Any) -> None:
    """End this worker once the process `main` has ended or sends a SIGTERM; ignore a SIGTERM of another process."""
    # A fork server is the parent of its workers, so os.getppid() is not the training process.
    is_child = multiprocessing.get_start_method() != "forkserver"
    # The training process may have ended before this line, so compare with its number instead of watching for a change.
    while main.is_alive() and (os.getppid() == main.pid or not is_child):
        if not _SAYS_WHO:
            time.sleep(_CHECK_SECONDS)
        elif (sent := signal.sigtimedwait({signal.SIGTERM}, _CHECK_SECONDS)) is not None and sent.si_pid == main.pid:
            break
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends. Processes forked in the block inherit the blocked signals."""
    if not _SAYS_WHO:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Loader(DataLoader[Batch | ValueError]):
    def check_worker_number_rationality(self) -> None:
        """Do not warn of more workers than processors, once for each epoch and process: `check_count` has a limit."""


class BatchLoader:
    """Iterate over batches of a data set.

    Feature stores and features in memory need no worker processes: one thread reads ahead, and `workers` has no effect.

    Args:
        dataset: the data set.
        index_batches: the caption indices of each batch, in order.
        workers: processes that read ahead; 0: read in this process. Workers help if batches come from a disk and the
            training step runs on another device. They end with this process.
        pin_memory: use page-locked memory for asynchronous copies to a GPU; no effect without a GPU.
        augmentation: changes the stored pictures of the data set.

    Raises:
        ValueError: there are too many workers; while iterating, as `CaptionDataset.batch`.
    """

    def __init__(
        self,
        dataset: Batched,
        index_batches: Sequence[np.ndarray] | Iterable[np.ndarray],
        *,
        workers: int = 0,
        pin_memory: bool = False,
        augmentation: PictureAugmentation | None = None,
    ) -> None:
        check_count("workers", workers)
        self._index_batches, self._dataset = index_batches, dataset
        self._augmentation = augmentation
        self._pin = pin_memory and torch.cuda.is_available()
        self._loader = _Loader(
            _Batches(dataset, augmentation),
            sampler=index_batches,
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=workers,
            worker_init_fn=_follow_main_process,
            pin_memory=self._pin,
        )

    def __len__(self) -> int:
        return len(self._index_batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        if self._dataset.source.in_process:
            if self._pin:
                self._dataset.source.pin_batches()
            yield from _fetched_ahead(self._batch, self._index_batches)
            return
        with _signals_blocked():
            # This starts the worker processes.
            items = iter(self._loader)
        try:
            for item in items:
                if isinstance(item, ValueError):
                    raise item
                yield item
        finally:
            # This ends the worker processes, even if a caller keeps the exception.
            del items

    def _batch(self, indices: np.ndarray) -> Batch:
        batch = _batch_of(self._dataset, indices, self._augmentation)
        return batch.pin_memory() if self._pin else batch


def _fetched_ahead(make: Callable[[np.ndarray], Batch], index_batches: Iterable[np.ndarray]) -> Iterator[Batch]:
    """Yield batches in order. One thread makes the next batches while the caller uses the current one."""
    waiting: collections.deque[Future[Batch]] = collections.deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        try:
            for indices in index_batches:
                waiting.append(thread.submit(make, indices))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # A caller that leaves early waits for one batch at most.
            for future in waiting:
                future.cancel()
