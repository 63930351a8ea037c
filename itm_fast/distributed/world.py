"""The processes of one run: rendezvous, shares of the work, agreement, and a common end.

Inside: `World`, `joined`, `joined_before`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from itm_fast.distributed.ending import ended
from itm_fast.distributed.launch import Launch, launched

__all__ = ["World", "joined", "joined_before"]

TIMEOUT = "ITM_FAST_TIMEOUT"
_SECONDS = 1800
_joined = False
# How often this process has met others; equal in all of them.
_meetings = 0
# Key of the store, by rank: the GPU of a process that sees only one.
_GPU = "itm_fast/gpu"
# Most seconds to wait for the gloo thread of the last collective, and seconds for those of the collectives before it.
_DROPPING, _GRACE = 10.0, 0.2


@attrs.frozen(eq=False)
class World:
    """The processes of one run. By default there is only one, and methods do not communicate.

    All processes call the same methods in the same order.

    Attributes:
        launch: rank and size of this process.
        group: the process group; None: torch's default group.
    """

    launch: Launch = attrs.field(factory=Launch)
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.size

    @property
    def first(self) -> bool:
        """Return whether this process has rank 0, which writes files and prints messages."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Return the device of this process: each of several processes uses its own GPU.

        Args:
            name: the device of the settings, such as "cpu" or "cuda".

        Raises:
            ValueError: there are several processes and `name` has a number, or there are fewer GPUs than processes on
                this machine and CUDA_VISIBLE_DEVICES does not select one GPU per process.
        """
        if self.size == 1 or not name.startswith("cuda"):
            return name
        if name != "cuda":
            raise ValueError(f"device: each process uses its own GPU; expected cuda without a number, got {name}")
        count = torch.cuda.device_count()
        if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
            # The launcher shows each process only its own GPU; `joined` checks that they differ.
            return "cuda:0"
        if count < self.launch.local_size:
            raise ValueError(f"device: {self.launch.local_size} processes need one GPU each, but torch finds {count}")
        return f"cuda:{self.launch.local_rank}"

    def counts(self, n: int) -> list[int]:
        """Return how many of `n` items each process takes. Counts differ by one at most, lower ranks take more."""
        return [n // self.size + (rank < n % self.size) for rank in range(self.size)]

    def share(self, n: int) -> slice:
        """Return the slice of `n` consecutive items that this process takes."""
        ends = [0, *itertools.accumulate(self.counts(n))]
        return slice(ends[self.rank], ends[self.rank + 1])

    def objects(self, value: Any) -> list[Any]:
        """Gather a small Python object from each process, by rank. Objects are pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, error: Exception | None = None, *, stop: bool = False) -> bool:
        """Return whether any process passes `stop`. If any process passes an error, all raise.

        Raises:
            Exception: `error`. A process without an error raises ValueError with the message of the lowest rank that
                has one.
        """
        if self.size > 1:
            flags = torch.tensor([error is not None, stop], dtype=torch.int32)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
            failed, stop = (bool(flag) for flag in flags.tolist())
            if failed:
                messages = self.objects(None if error is None else str(error))
                if error is None:
                    raise ValueError(next(message for message in messages if message is not None))
        if error is not None:
            raise error
        return stop

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait at the end of a block for all processes. If one raises ValueError or OSError, all raise."""
        error: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as raised:
            error = raised
        self.agree(error)


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """Connect the processes of a launcher for the duration of a block.

    A single process does nothing, and an existing process group is used as it is. Otherwise the processes connect as
    the environment of the launcher says. They use NCCL for tensors on GPUs, and gloo for tensors on the CPU and for
    Python objects.

    If processes leave the block with an error, one raises it and the others exit with status 1 without a message, so
    that the user sees one message. Only rank 0 issues warnings. All processes enter the same blocks in the same order.

    Args:
        device: the device of tensors, such as "cpu" or "cuda".

    Raises:
        ValueError: a variable of the launcher is missing or wrong, the processes cannot connect, two of them see the
            same single GPU, or one ended or did not answer within ITM_FAST_TIMEOUT seconds (default: 1800). The message
            has the cause if it is known.
    """
    global _joined, _meetings
    if dist.is_available() and dist.is_initialized():
        yield World(Launch(dist.get_rank(), dist.get_world_size(), *_local()))
        return
    launch = launched()
    if launch.size == 1:
        yield World()
        return
    world, seconds = World(launch), _timeout()
    own_device = world.device(device)
    if own_device.startswith("cuda"):
        torch.cuda.set_device(own_device)
    backend = "cpu:gloo,cuda:nccl" if own_device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=seconds)
    try:
        # Imported here: torch may lack torch.distributed, and a single process does not need it.
        from torch.distributed.rendezvous import rendezvous

        _meetings += 1
        found, rank, size = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        # The launcher's store outlives the block, and with it the keys of the block's process group.
        store = dist.PrefixStore(f"itm_fast/{_meetings}", found)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        shared = _shared_gpu(store, launch) if own_device.startswith("cuda") else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        # Wait for all: a process could connect and end before another has connected.
        world.agree()
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{launch.everyone} cannot connect at {launch.address}: {reason}") from None
    _joined = True
    try:
        if shared is not None:
            raise ValueError(f"device: processes {shared[0]} and {shared[1]} see the same GPU; each needs its own")
        with warnings.catch_warnings():
            if not world.first:
                warnings.simplefilter("ignore")
            yield world
        world.agree()
        _wait_for_gloo(world)
        dist.destroy_process_group()
    except BaseException as error:
        raised = ended(error, store, launch, seconds)
        if raised is error:
            raise
        raise raised from None


def _wait_for_gloo(world: World) -> None:
    """Wait until gloo's threads have dropped the tensors of the last collectives.

    A thread needs Python's lock for that. If the main thread freed the process group first, it would hold the lock and
    wait for the thread: the process would hang or abort at its end.
    """
    last = torch.zeros(1)
    dist.all_reduce(last, group=world.group)
    dropped, end = weakref.ref(last), time.monotonic() + _DROPPING
    del last
    while dropped() is not None and time.monotonic() < end:
        time.sleep(0.001)
    # Another thread may still wait for the lock to drop an earlier tensor. Nothing shows whether it does.
    time.sleep(_GRACE)


def _shared_gpu(store: Any, launch: Launch) -> tuple[int, int] | None:
    """Return the first two ranks that see the same single GPU, or None. All processes must call this."""
    own = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.device_count() == 1 else ""
    store.set(f"{_GPU}/{launch.rank}", own)
    found: dict[str, int] = {}
    for rank in range(launch.size):
        name = store.get(f"{_GPU}/{rank}").decode()
        if name and found.setdefault(name, rank) != rank:
            return found[name], rank
    return None


def joined_before() -> bool:
    """Return whether this process has connected to others: then only one process reports an error to the user."""
    return _joined


def _local() -> tuple[int, int]:
    launch = launched()
    return launch.local_rank, launch.local_size


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{TIMEOUT}: expected a number of seconds above 0, got {text!r}")
    return seconds
