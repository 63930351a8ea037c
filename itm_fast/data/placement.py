"""Where the features of a training lie: on the disk, in the memory of the host, or in that of the device.

Inside: `place`, `Placement`, `PLACEMENTS`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from tqdm import tqdm

from itm_fast.data.features import BLOCK_BYTES, Features, ResidentFeatures
from itm_fast.data.host_memory import host_memory
from itm_fast.distributed import World

__all__ = ["PLACEMENTS", "Placement", "host_room", "place"]

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


def place(
    source: Features, asked: str, device: torch.device, world: World | None = None, *, progress: bool = False
) -> tuple[Features, Placement]:
    """The features where they were asked for, and where that is.

    `auto` takes the memory of a GPU where the features fit beside a training, else page-locked memory of the host where
    they fit there, else the disk. A training on the CPU leaves them on the disk, whose pages the system keeps in memory
    by itself while there is room. Where a place turns out not to take them, `auto` goes on to the next one.

    Of several processes each has a copy, those of a machine in shares of its memory, and all take the same place: each
    says how much room it has before any of them takes some, and the smallest room counts.

    Args:
        source: features on the disk.
        asked: one of `PLACEMENTS`.
        device: where batches are needed, of the same kind in all processes.
        world: the processes that place the same features, all of which call this; one alone by default.
        progress: show a progress bar, where there is a terminal, while features are read.

    Raises:
        ValueError: `host` or `device` was asked for, and they do not fit, or how much memory is free there is
            not known; or a row is refused while they are read. Where one process raises all do.
    """
    if asked not in PLACEMENTS:
        raise ValueError(f"features: expected one of {', '.join(PLACEMENTS)}, got {asked!r}")
    world = world or World()
    failed: dict[str, str] = {}
    while True:
        choice = _choice(source.nbytes, asked, device, failed, world)
        if choice.where == "disk":
            return source, choice
        placed, problem = _tried(source, device, world, on_device=choice.where == "device", progress=progress)
        if placed is not None:
            return placed, choice
        failed[choice.where] = f"{choice.reason}, but {problem}"
        if asked != "auto":
            raise ValueError(f"features: they cannot be placed: {failed[choice.where]}")


def host_room(world: World | None = None) -> int | None:
    """The bytes that each process may take of the host's memory beside a training; None: how much is free is not known.

    All processes of `world` must call this.
    """
    return _room("host", "auto", torch.device("cpu"), world or World())


def _tried(
    source: Features, device: torch.device, world: World, *, on_device: bool, progress: bool
) -> tuple[ResidentFeatures | None, str]:
    """All features in memory, or None and why a process has no memory for them."""
    placed, problem, refused = None, "", None
    try:
        placed = _resident(source, device, on_device=on_device, progress=progress)
    except _NotLockedError as error:
        problem = str(error)
    except (torch.OutOfMemoryError, MemoryError):
        problem = "it is out of memory"
    except (ValueError, OSError) as error:
        refused = error
    world.agree(refused)
    problem = next(filter(None, world.objects(problem)), "")
    return (None if problem else placed), problem


def _choice(needed: int, asked: str, device: torch.device, failed: Mapping[str, str], world: World) -> Placement:
    """Where features of `needed` bytes go; `failed` are the places that were tried, and what became of it."""
    size = f"{needed / 2**30:.2f} GiB"
    if asked == "disk":
        return Placement("disk", "as asked for")
    if device.type == "cpu" and asked == "auto":
        return Placement("disk", f"{size}, which the system caches; training runs on the CPU")
    tried = []
    for where in ("device", "host") if asked == "auto" else (asked,):
        if where in failed:
            tried.append(failed[where])
            continue
        room = _room(where, asked, device, world)
        if room is None:
            unknown = f"how much memory of the {where} ({device if where == 'device' else 'cpu'}) is free is not known"
            if asked != "auto":
                raise ValueError(f"features: {unknown}; expected auto or disk")
            tried.append(f"{size} of features, {unknown}")
            # Memory of the host is for copies that run beside a GPU: of other devices nothing is known of them.
            break
        what = f"{size} of features, {max(room, 0) / 2**30:.2f} GiB to spare in the memory of the {where}"
        if needed <= room:
            return Placement(where, what)
        if asked != "auto":
            raise ValueError(f"features: they do not fit into the memory of the {where}: {what}")
        tried.append(what)
    return Placement("disk", "; ".join(tried))


def _room(where: str, asked: str, device: torch.device, world: World) -> int | None:
    """The bytes that each process can spare in the memory of the device or the host; None where one does not know."""
    memory, room = _memory(device if where == "device" else torch.device("cpu")), None
    if memory is not None:
        free, total = memory
        room = free - max(int(_KEPT_SHARE * total), _KEPT_BYTES if asked == "auto" else 0)
        # Processes have a GPU each, and the memory of the machine together.
        if where == "host" or device.type == "cpu":
            room //= world.launch.local_size
    rooms = world.objects(room)
    return None if None in rooms else min(rooms)


def _memory(device: torch.device) -> tuple[int, int] | None:
    """Free bytes and all bytes of a device's memory; None where it does not say."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return host_memory() if device.type == "cpu" else None


def _resident(source: Features, device: torch.device, *, on_device: bool, progress: bool) -> ResidentFeatures:
    """All features in memory, read in blocks."""
    regions = source.shape[0] * source.shape[1] if source.counts is None else int(source.counts.sum())
    if on_device and device.type != "cpu":
        values = torch.empty(regions, source.shape[2], dtype=source.dtype, device=device)
    else:
        memory = np.empty(regions * source.shape[2] * source.dtype.itemsize, dtype=np.uint8)
        if device.type == "cuda":
            _lock_pages(memory, device)
        values = torch.from_numpy(memory).view(source.dtype).view(regions, source.shape[2])
    step = max(BLOCK_BYTES // (source.shape[1] * source.shape[2] * source.dtype.itemsize), 1)
    filled = 0
    silent = None if progress else True
    with tqdm(total=source.nbytes, desc="features", unit="B", unit_scale=True, leave=False, disable=silent) as bar:
        for first in range(0, source.shape[0], step):
            rows = source.stored(first, min(first + step, source.shape[0]))
            values[filled : filled + len(rows)].copy_(rows)
            filled += len(rows)
            bar.update(rows.nbytes)
    return ResidentFeatures(values, source.shape, source.counts, device, by_image=values.device.type != device.type)


class _NotLockedError(Exception):
    """The system does not keep the memory in place."""


def _lock_pages(memory: np.ndarray, device: torch.device) -> None:
    """Makes copies to a GPU asynchronous; page-locked memory of torch's own comes in powers of two alone."""
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status != 0:
        # The runtime keeps the error, and the next kernel of torch would report and clear it: this one does.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise _NotLockedError(f"it could not be page-locked (CUDA error {status})")
    # Tensors of this memory hold the array, and its finalizer runs before its memory is given back.
    weakref.finalize(memory, _unlock_pages, runtime, memory.ctypes.data, os.getpid())


def _unlock_pages(runtime: Any, address: int, process: int) -> None:
    # A child process that was forked has no CUDA, and nothing locked.
    if os.getpid() == process:
        runtime.cudaHostUnregister(address)
