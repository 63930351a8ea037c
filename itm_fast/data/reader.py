"""Read many rows of shards at a time, with the native reader or, if it was not built, in Python.

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
from itm_fast.files import regular
from itm_fast.files.installation import host_module
from itm_fast.files.processors import available

__all__ = ["MOST_THREADS", "BufferPool", "ShardReader", "default_threads"]

MOST_THREADS = 8
# Buffers in rotation: two for batches read ahead, one for the current batch, and one that is filled before the current
# batch is released.
_BUFFERS = 4


class _Native(Protocol):
    def gather(self, rows: np.ndarray, buffer: np.ndarray, wanted: str, threads: int) -> tuple[str, int, int]: ...


def default_threads() -> int:
    """Return the number of processors for this process, at most eight.

    Processes of a launcher share the processors of their machine, unless each is bound to its own.
    """
    processes = 1
    with contextlib.suppress(ValueError):
        processes = launched().local_size
    return max(min(available(), (os.cpu_count() or 1) // processes, MOST_THREADS), 1)


class ShardReader:
    """Read rows of numbers from files that must not change. At most 256 files stay open.

    Args:
        paths: the files.
        states: their present states. Size, modification time and inode are compared before and after each read.
        dtype: the type of the numbers: "bf16", "fp16" or "fp32".
        threads: threads per call.
    """

    def __init__(self, paths: Sequence[Path], states: Sequence[os.stat_result], dtype: str, threads: int) -> None:
        files = [
            (str(path), state.st_size, state.st_mtime_ns, state.st_ino)
            for path, state in zip(paths, states, strict=True)
        ]
        host = _host()
        self.threads, self.dtype = threads, dtype
        if host is None:
            self._reader: _Native = _PythonReader(files, dtype)
        else:
            # As bytes, because not every path is UTF-8.
            self._reader = host.ShardReader([(os.fsencode(path), *state) for path, *state in files], dtype)

    def gather(self, rows: np.ndarray, buffer: np.ndarray, wanted: str = "fp32") -> tuple[str, int, int]:
        """Fill `buffer` with numbers and check that all are finite.

        Args:
            rows: (n, 4) int64. Each row has the number of its file, the byte at which it starts, its count of numbers,
                and its position in the buffer, in numbers.
            buffer: contiguous, 2 or 4 bytes per number.
            wanted: the type of the buffer: "fp32" or the stored type.

        Returns:
            The first problem in the order of `rows` ("changed", "short read", "not readable", "not finite" or ""), its
            row, and the number of bytes found or an errno.
        """
        return self._reader.gather(rows, buffer, wanted, self.threads)


def _host() -> Any:
    return host_module()


class _PythonReader:
    """The native reader's work, in one thread of Python."""

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
                with regular.open_file(self._files[file][0]) as opened:
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
        # If a file was written to meanwhile, each of its rows may mix old and new content.
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
    """Reuse the memory of batches that no tensor refers to any more.

    Fresh memory costs more than reading into it, because the system clears every page first. All buffers are allocated
    with the first batches, so memory use is constant afterwards. With `pin`, buffers come from torch's page-locked
    allocator, which reuses them once copies from them have ended.
    """

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self._made = 0
        # Its operations are atomic: one thread takes buffers while another returns them.
        self._free: collections.deque[np.ndarray] = collections.deque(maxlen=_BUFFERS)

    def take(self, size: int) -> torch.Tensor:
        """Return a tensor of `size` uninitialised float32 numbers."""
        if self._pin:
            return torch.empty(size, dtype=torch.float32, pin_memory=True)
        buffer = None
        if self._made >= _BUFFERS:
            with contextlib.suppress(IndexError):
                buffer = self._free.popleft()
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, dtype=np.float32)
            self._made += 1
        # The storage of a tensor from numpy refers to this array, and views of the tensor refer to the storage.
        view = buffer[:size]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return torch.from_numpy(view)
