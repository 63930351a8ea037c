"""Rows of shards, many at a time: by the native reader, or by Python where that was not built.

Inside: `ShardReader`, `BufferPool`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from itm_fast.distributed import launched
from itm_fast.files.installation import host_module
from itm_fast.processors import available

__all__ = ["MOST_THREADS", "BufferPool", "ShardReader", "default_threads"]

MOST_THREADS = 8
# Buffers that take turns: two of batches read ahead, one of the batch in work, and one that is read into before that
# batch has gone.
_BUFFERS = 4


class _Native(Protocol):
    def gather(self, rows: np.ndarray, buffer: np.ndarray, wanted: str, threads: int) -> tuple[str, int, int]: ...


def default_threads() -> int:
    """As many threads as there are processors for this process, and at most eight.

    Processes of a launcher share the processors of their machine, where they are not bound to some of them already.
    """
    processes = 1
    with contextlib.suppress(ValueError):
        processes = launched().local_size
    return max(min(available(), (os.cpu_count() or 1) // processes, MOST_THREADS), 1)


class ShardReader:
    """Reads rows of numbers from files that must stay as they are; of any number of them 256 at most stay open.

    Args:
        paths: the files. states: what each is now: size, time of modification and inode are compared before rows of it
            are read, and again afterwards.
        dtype: what they hold: "bf16", "fp16" or "fp32".
        threads: threads of a call.
    """

    def __init__(self, paths: Sequence[Path], states: Sequence[os.stat_result], dtype: str, threads: int) -> None:
        files = [
            (str(path), state.st_size, state.st_mtime_ns, state.st_ino)
            for path, state in zip(paths, states, strict=True)
        ]
        host = _host()
        self.threads, self.dtype = threads, dtype
        self._reader: _Native = _PythonReader(files, dtype) if host is None else host.ShardReader(files, dtype)

    def gather(self, rows: np.ndarray, buffer: np.ndarray, wanted: str = "fp32") -> tuple[str, int, int]:
        """Fills `buffer` with numbers of the type `wanted`, fp32 or as stored, and checks that all are finite.

        Args:
            rows: (n, 4) int64; of each row its file, the byte where it starts, how many numbers it has, and which
                number of the buffer is its first.
            buffer: contiguous, of 2 or 4 bytes a number.

        Returns:
            The first problem in the order of `rows`: "changed", "short read", "not readable", "not finite" or ""; its
            row; and the bytes that were there, or an errno.
        """
        return self._reader.gather(rows, buffer, wanted, self.threads)


def _host() -> Any:
    return host_module()


class _PythonReader:
    """What the native reader does, in one thread."""

    def __init__(self, files: Sequence[tuple[str, int, int, int]], dtype: str) -> None:
        self._files, self._dtype = files, dtype

    def gather(self, rows: np.ndarray, buffer: np.ndarray, wanted: str, _threads: int) -> tuple[str, int, int]:
        stored = np.dtype(np.float32 if self._dtype == "fp32" else np.uint16)
        found = "", -1, 0
        firsts: dict[int, int] = {}
        for position, (file, offset, values, destination) in enumerate(rows.tolist()):
            firsts.setdefault(file, position)
            try:
                if not self._is_as_before(file):
                    return "changed", position, 0
                with Path(self._files[file][0]).open("rb") as opened:
                    opened.seek(offset)
                    content = opened.read(values * stored.itemsize)
            except OSError as error:
                return "not readable", position, error.errno or 0
            if len(content) < values * stored.itemsize:
                found = "short read", position, len(content)
                break
            numbers = np.frombuffer(content, dtype=stored)
            widened = _widened(numbers, self._dtype)
            if not np.isfinite(widened).all():
                found = "not finite", position, 0
                break
            buffer[destination : destination + values] = widened if wanted == "fp32" else numbers.view(buffer.dtype)
        # Of a file that was written to meanwhile any of the rows may be half of the one and half of the other.
        changed = next((position for file, position in firsts.items() if not self._is_there_as_before(file)), None)
        return found if changed is None else ("changed", changed, 0)

    def _is_there_as_before(self, file: int) -> bool:
        try:
            return self._is_as_before(file)
        except OSError:
            return False

    def _is_as_before(self, file: int) -> bool:
        path, *before = self._files[file]
        try:
            state = Path(path).stat()
        except FileNotFoundError:
            return False
        return [state.st_size, state.st_mtime_ns, state.st_ino] == before


def _widened(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.view(np.float16).astype(np.float32) if dtype == "fp16" else numbers


class BufferPool:
    """Memory for one batch after the other, used again once no tensor has it.

    Fresh memory costs more than reading into it: the system clears every page of it first. All buffers come to be with
    the first batches and take turns from then on, so that memory stands still from there. With `pin` buffers are
    page-locked ones of torch's own, which torch uses again once copies from them have ended.
    """

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self._made = 0
        # Its operations are atomic: one thread reads ahead while another gives back.
        self._free: collections.deque[np.ndarray] = collections.deque(maxlen=_BUFFERS)

    def take(self, size: int) -> torch.Tensor:
        """`size` float32 numbers of any value."""
        if self._pin:
            return torch.empty(size, dtype=torch.float32, pin_memory=True)
        buffer = None
        if self._made >= _BUFFERS:
            with contextlib.suppress(IndexError):
                buffer = self._free.popleft()
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, dtype=np.float32)
            self._made += 1
        # The storage of a tensor from numpy holds this very array, and views of the tensor hold the storage.
        view = buffer[:size]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return torch.from_numpy(view)
