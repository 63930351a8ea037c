"""Storage for the rows of the discriminators: memory, or memory-mapped files.

Inside: `in_memory`, `mapped`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from itm_fast.files import atomic

__all__ = ["in_memory", "mapped"]


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros. The operating system allocates memory for a row when it is first written."""
    return torch.zeros(shape, dtype=dtype)


def mapped(
    folder: Path, root: str | os.PathLike[str] | None = None
) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """Return a function that makes zero tensors in unnamed files of `folder`, which disappear when the process ends.

    Raises:
        OSError: the disk is full. The one-line message names the folder.
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        with (
            atomic.naming_full_disk(folder),
            atomic.open_folder(folder, root) as opened,
            tempfile.TemporaryFile(dir=opened.native_path()) as file,
        ):
            # Without reserved space, writing to a mapped file on a full disk kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            content = np.memmap(file, dtype=np.uint8, mode="w+", shape=size)
        return torch.from_numpy(content).view(dtype).view(shape)

    return allocate
