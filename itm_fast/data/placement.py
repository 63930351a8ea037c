"""Where the features of a training lie: on the disk, in the memory of the host, or in that of the device.

Inside: `place`, `Placement`, `PLACEMENTS`.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from torch import Tensor

from .features import BLOCK_BYTES, Features, ResidentFeatures

__all__ = ["PLACEMENTS", "Placement", "place"]

PLACEMENTS = ("auto", "disk", "host", "device")
# Of the memory that is free, what a training needs beside its features: this share of all, and at least so much.
_KEPT_SHARE, _KEPT_BYTES = 0.25, 4 * 2**30


@attrs.frozen
class Placement:
    """The choice and its reason, as a run says them."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where} ({self.reason})"


def place(source: Features, asked: str, device: torch.device) -> tuple[Features, Placement]:
    """The features where they were asked for, and where that is.

    `auto` takes the memory of a GPU where the features fit beside a training, else page-locked memory of the host where
    they fit there, else the disk. A training on the CPU leaves them on the disk, whose pages the system keeps in memory
    by itself while there is room.

    Args:
        source: features on the disk.
        asked: one of `PLACEMENTS`.
        device: where batches are needed.

    Raises:
        ValueError: `host` or `device` was asked for, and they do not fit; or a row is refused while they are read.
    """
    if asked not in PLACEMENTS:
        raise ValueError(f"features: expected one of {', '.join(PLACEMENTS)}, got {asked!r}")
    choice = _choice(source.nbytes, asked, device)
    if choice.where == "disk":
        return source, choice
    return _resident(source, device, on_device=choice.where == "device"), choice


def _choice(needed: int, asked: str, device: torch.device) -> Placement:
    size = f"{needed / 2**30:.2f} GiB"
    if asked == "disk":
        return Placement("disk", "as asked for")
    if device.type == "cpu" and asked == "auto":
        return Placement("disk", f"{size}, which the system caches; training runs on the CPU")
    tried = []
    for where in ("device", "host") if asked == "auto" else (asked,):
        free, total = _memory(device if where == "device" else torch.device("cpu"))
        room = free - max(int(_KEPT_SHARE * total), _KEPT_BYTES if asked == "auto" else 0)
        what = f"{size} of features, {max(room, 0) / 2**30:.2f} GiB to spare in the memory of the {where}"
        if needed <= room:
            return Placement(where, what)
        if asked != "auto":
            raise ValueError(f"features: they do not fit into the memory of the {where}: {what}")
        tried.append(what)
    return Placement("disk", "; ".join(tried))


def _memory(device: torch.device) -> tuple[int, int]:
    """Free bytes and all bytes of a device's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    if device.type != "cpu":
        raise ValueError(f"features: how much memory {device} has is not known; expected auto on cpu or cuda, or disk")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * kilobytes["MemAvailable"], 1024 * kilobytes["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        raise ValueError("features: this system does not say how much memory is free; expected disk") from None


def _resident(source: Features, device: torch.device, *, on_device: bool) -> ResidentFeatures:
    """All features in memory, read in blocks."""
    regions = source.shape[0] * source.shape[1] if source.counts is None else int(source.counts.sum())
    where = device if on_device else torch.device("cpu")
    values = torch.empty(regions, source.shape[2], dtype=source.dtype, device=where)
    step = max(BLOCK_BYTES // (source.shape[1] * source.shape[2] * source.dtype.itemsize), 1)
    filled = 0
    for first in range(0, source.shape[0], step):
        rows = source.stored(first, min(first + step, source.shape[0]))
        values[filled : filled + len(rows)].copy_(rows)
        filled += len(rows)
    by_image = where.type == "cpu" and device.type == "cuda"
    if by_image:
        _lock_pages(values)
    return ResidentFeatures(values, source.shape, source.counts, device, by_image=by_image)


def _lock_pages(values: Tensor) -> None:
    """Makes copies to a GPU asynchronous; page-locked memory of torch's own comes in powers of two alone."""
    status = torch.cuda.cudart().cudaHostRegister(values.data_ptr(), values.numel() * values.element_size(), 0)
    if int(status) != 0:
        raise ValueError(f"features: the memory of the host could not be page-locked (CUDA error {int(status)})")
