"""Which captions form a batch, and fetching batches ahead.

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
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from itm_fast.data.dataset import Batch, CaptionDataset
from itm_fast.processors import check_count

# Batches that are made while one is worked on.
_AHEAD = 2
# macOS does not say who sent a signal.
_SAYS_WHO = hasattr(signal, "sigtimedwait")
# How often a worker looks whether the training process is still there.
_CHECK_SECONDS = 1.0


class EpochSampler:
    """Index batches of one epoch, a function of (seed, epoch) alone, so that a run can resume in mid-epoch.

    Args:
        n: number of items. batch_size: items per batch. seed, epoch: non-negative integers.
        shuffle: False gives the items in order.
        drop_last: leaves a last batch of fewer items out.
        start_batch: leaves the first batches out; the others are those of the whole epoch.
        lengths: (n,) the length of each item, with `bucket_batches`.
        bucket_batches: items of like length share a batch: of the shuffled items so many batches at a time are sorted
            by length and cut into batches, whose order is shuffled in turn. 0: none of it. A batch that is not full
            stays the last.
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
        # SeedSequence mixes the pair, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
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


def _follow_main_process(_worker: int) -> None:
    # Ctrl-C reaches every process of a terminal, and a SIGTERM of torchrun, timeout or a batch system all processes of
    # a job. The training process may want to finish its step first, and ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _SAYS_WHO:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(main: Any) -> None:
    """End this worker once the process `main` has ended or sends a SIGTERM; ignore a SIGTERM of another process."""
    # A fork server starts all workers, so os.getppid() tells nothing of the training process.
    is_child = multiprocessing.get_start_method() != "forkserver"
    # The training process may have ended before this function began, so its number is compared, not watched for change.
    while main.is_alive() and (os.getppid() == main.pid or not is_child):
        if not _SAYS_WHO:
            time.sleep(_CHECK_SECONDS)
        elif (sent := signal.sigtimedwait({signal.SIGTERM}, _CHECK_SECONDS)) is not None and sent.si_pid == main.pid:
            break
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Signals that come meanwhile are had afterwards; what is forked meanwhile has none before it asks for them."""
    if not _SAYS_WHO:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class BatchLoader:
    """Iterates over the batches of `dataset` that `index_batches` names, in that order.

    `workers=0` reads in this process; more read ahead in worker processes, which pays where batches come from a disk
    and the training step runs on another device. `pin_memory=True` makes copies to a GPU asynchronous; where there is
    none it does nothing. Features that are read in this process by threads of their own, or lie in memory, are fetched
    ahead by one thread, whatever `workers` says. Raises what `CaptionDataset.batch` raises.
    """

    def __init__(
        self,
        dataset: CaptionDataset,
        index_batches: Sequence[np.ndarray] | Iterable[np.ndarray],
        *,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_count("workers", workers)
        self._index_batches, self._dataset = index_batches, dataset
        self._pin = pin_memory and torch.cuda.is_available()
        self._loader: DataLoader[Batch | ValueError] = DataLoader(
            _Batches(dataset),
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
            # Worker processes come to be.
            items = iter(self._loader)
        try:
            for item in items:
                if isinstance(item, ValueError):
                    raise item
                yield item
        finally:
            # Worker processes end with it, whoever keeps an error.
            del items

    def _batch(self, indices: np.ndarray) -> Batch:
        batch = self._dataset.batch(indices)
        return batch.pin_memory() if self._pin else batch


def _fetched_ahead(make: Callable[[np.ndarray], Batch], index_batches: Iterable[np.ndarray]) -> Iterator[Batch]:
    """The batches in their order, made by one thread while the caller works on the ones before."""
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
