"""Map the tensors of a safetensors file into memory, and take the pages back from memory when they are too many.

Inside: `MappedFile`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from itm_fast.files import regular
from itm_fast.files.messages import shortened

__all__ = ["MappedFile"]

_TYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I8": torch.int8,
}


class MappedFile:
    """The tensors of a safetensors file in mapped memory. Pages are read from the disk when they are used.

    Args:
        file: the file, opened for reading; it may be closed afterwards.
        path: its name, for messages.

    Attributes:
        tensors: the tensors by name. Do not change them.

    Raises:
        ValueError: the header is damaged, or a tensor has another type than an index stores.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            # Compares types, shapes and bounds of all tensors with the size of the file.
            with safetensors.safe_open(regular.native_path(file.fileno(), path), framework="pt"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: not a readable segment ({shortened(str(error))})") from None
        except RuntimeError as error:
            # Of the system, such as too many open files.
            raise OSError(f"{path}: cannot be mapped ({shortened(str(error))})") from None
        # A private mapping that may be written, because PyTorch warns of others.
        self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size = int.from_bytes(self._mapping[:8], "little")
        header: dict[str, Any] = json.loads(self._mapping[8 : 8 + size])
        header.pop("__metadata__", None)
        self.tensors = {name: self._tensor(one, 8 + size, path) for name, one in header.items()}
        self._places = {name: tuple(8 + size + end for end in one["data_offsets"]) for name, one in header.items()}

    def _tensor(self, entry: dict[str, Any], start: int, path: Path) -> Tensor:
        dtype, shape = _TYPES.get(entry["dtype"]), entry["shape"]
        if dtype is None:
            raise ValueError(f"{path}: not a readable segment (a tensor of type {shortened(str(entry['dtype']))})")
        first, last = entry["data_offsets"]
        if first == last:
            return torch.empty(shape, dtype=dtype)
        count = (last - first) // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start + first).view(shape)

    def release(self, kept: Iterable[str] = ()) -> None:
        """Take the pages out of the memory of this process, except those of the tensors `kept`.

        They stay in the page cache of the system.
        """
        self._advise("MADV_DONTNEED", kept)

    def scatter(self, kept: Iterable[str] = ()) -> None:
        """Announce reads in no order, except of the tensors `kept`.

        The system then reads nothing ahead, and maps no huge pages, which hold much more than what is read.
        """
        self._advise("MADV_RANDOM", kept)
        self._advise("MADV_NOHUGEPAGE", kept)

    def fetch(self, name: str, starts: Tensor, ends: Tensor) -> None:
        """Begin to read rows of a tensor from the disk, from `starts` to `ends`, int64 (n,) in ascending order."""
        advice = getattr(mmap, "MADV_WILLNEED", None)
        if advice is None or not len(starts):
            return
        tensor = self.tensors[name]
        row = tensor[:1].numel() * tensor.dtype.itemsize
        # Ranges that touch are read at once.
        breaks = starts[1:] > ends[:-1]
        firsts = torch.cat([starts[:1], starts[1:][breaks]]) * row + self._places[name][0]
        lasts = torch.cat([ends[:-1][breaks], ends[-1:]]) * row + self._places[name][0]
        firsts -= firsts % mmap.PAGESIZE
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if last > first:
                self._mapping.madvise(advice, first, last - first)

    def _advise(self, advice: str, kept: Iterable[str]) -> None:
        """Give advice on all pages but those of the tensors `kept`, where the system knows it."""
        number = getattr(mmap, advice, None)
        if number is None:
            return
        first = 0
        for start, end in sorted([*(self._places[name] for name in kept), (len(self._mapping),) * 2]):
            # Whole pages only; the last one of the file may be partial.
            last = start if start == len(self._mapping) else start // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                # A system may have been built without the advice.
                with contextlib.suppress(OSError):
                    self._mapping.madvise(number, first, last - first)
            first = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
