"""Choose where training features are kept: on disk, in host memory, or in device memory.

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
# Memory left free for the training: this share of all memory, and at least this many bytes.
_KEPT_SHARE, _KEPT_BYTES = 0.25, 4 * 2**30


@attrs.frozen
class Placement:
    """A place and the reason for its choice, as a run prints them."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where} ({self.reason})"


def place(
    source: Features, asked: str, device: torch.device, world: World | None = None, *, progress: bool = False
) -> tuple[Features, Placement]:
    """Put features into the memory that was asked for.

    `auto` takes GPU memory if the features fit there beside the training, else page-locked host memory if they fit,
    else the disk. For training on the CPU, `auto` takes the disk, because the system caches its pages. If allocating
    fails, `auto` tries the next place.

    Each process has a copy, and the processes of a machine share its memory. All processes take the same place: they
    compare their free memory before any of them allocates, and the smallest counts.

    Args:
        source: features on disk.
        asked: one of `PLACEMENTS`.
        device: the device of the batches, of the same kind in all processes.
        world: the processes that place the same features, all of which call this; default: one process.
        progress: show a progress bar on a terminal while features are read.

    Returns:
        The placed features, and the choice.

    Raises:
        ValueError: `host` or `device` was asked for, and the features do not fit or the free memory is unknown; or a
            row is refused while it is read. If one process raises, all do.
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
    """Return the bytes of host memory that each process may use beside a training; None if this is unknown.

    All processes of `world` must call this.
    """
    return _room("host", "auto", torch.device("cpu"), world or World())


def _tried(
    source: Features, device: torch.device, world: World, *, on_device: bool, progress: bool
) -> tuple[ResidentFeatures | None, str]:
    """Return all features in memory, or None and the reason why a process has no memory for them."""
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
    """Choose the place for features of `needed` bytes; `failed` maps the places that were tried to the reasons."""
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
            unknown = f"the free memory of the {where} ({device if where == 'device' else 'cpu'}) is unknown"
            if asked != "auto":
                raise ValueError(f"features: {unknown}; expected auto or disk")
            tried.append(f"{size} of features, {unknown}")
            # Host memory is for asynchronous copies to a GPU; whether other devices support them is unknown.
            break
        what = f"{size} of features, {max(room, 0) / 2**30:.2f} GiB to spare in the memory of the {where}"
        if needed <= room:
            return Placement(where, what)
        if asked != "auto":
            raise ValueError(f"features: they do not fit into the memory of the {where}: {what}")
        tried.append(what)
    return Placement("disk", "; ".join(tried))


def _room(where: str, asked: str, device: torch.device, world: World) -> int | None:
    """Return the free bytes for each process in device or host memory; None if a process does not know."""
    memory, room = _memory(device if where == "device" else torch.device("cpu")), None
    if memory is not None:
        free, total = memory
        room = free - max(int(_KEPT_SHARE * total), _KEPT_BYTES if asked == "auto" else 0)
        # Each process has a GPU, and all processes share the host memory.
        if where == "host" or device.type == "cpu":
            room //= world.launch.local_size
    rooms = world.objects(room)
    return None if None in rooms else min(rooms)


def _memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and total bytes of a device's memory; None if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return host_memory() if device.type == "cpu" else None


def _resident(source: Features, device: torch.device, *, on_device: bool, progress: bool) -> ResidentFeatures:
    """Read all features into memory, in blocks."""
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
    """The memory could not be page-locked."""


def _lock_pages(memory: np.ndarray, device: torch.device) -> None:
    """Page-lock memory for asynchronous copies to a GPU. torch's own allocator rounds sizes up to powers of two."""
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status != 0:
        # The runtime reports the error again with the next kernel. This kernel clears it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise _NotLockedError(f"it could not be page-locked (CUDA error {status})")
    # Tensors of this memory refer to the array, and its finalizer runs before its memory is freed.
    weakref.finalize(memory, _unlock_pages, runtime, memory.ctypes.data, os.getpid())


def _unlock_pages(runtime: Any, address: int, process: int) -> None:
    # A forked child process has no CUDA context and no page-locked memory.
    if os.getpid() == process:
        runtime.cudaHostUnregister(address)
