"""Where the rows of the discriminators lie: in memory, or in files that the system maps into it.

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
    """Zeros; the system gives memory for a row when it is first written."""
    return torch.zeros(shape, dtype=dtype)


def mapped(
    folder: Path, root: str | os.PathLike[str] | None = None
) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """Makes tensors of zeros in files of `folder`, which have no names: they end with the process, however it ends.

    Raises:
        OSError: there is no room for a file; one line that names the folder.
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        with (
            atomic.naming_full_disk(folder),
            atomic.open_folder(folder, root) as opened,
            tempfile.TemporaryFile(dir=opened.native_path()) as file,
        ):
            # Without room of its own a mapped file ends the process when the disk is full.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            content = np.memmap(file, dtype=np.uint8, mode="w+", shape=size)
        return torch.from_numpy(content).view(dtype).view(shape)

    return allocate
