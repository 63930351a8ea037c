"""The processes of one run: how they meet, share out their work, and end together.

Inside: `World`, `joined`, `joined_before`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
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
# Which GPU a process sees that sees one alone, by rank.
_GPU = "itm_fast/gpu"


@attrs.frozen(eq=False)
class World:
    """The processes that work on one run; one alone by default, whose methods then have nothing to do.

    Every process calls the same methods in the same order.

    Attributes:
        launch: which of them this one is.
        group: the process group; None: torch's default one.
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
        """Whether this process is the one that writes files and talks to the user."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this process where `name` was asked for: of several processes each takes a GPU of its own.

        Raises:
            ValueError: `name` is one certain GPU, or there are fewer GPUs than processes on this machine, none of which
                is the only one that CUDA_VISIBLE_DEVICES shows.
        """
        if self.size == 1 or not name.startswith("cuda"):
            return name
        if name != "cuda":
            raise ValueError(f"device: each process takes a GPU of its own; expected cuda without a number, got {name}")
        count = torch.cuda.device_count()
        if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
            # A launcher that shows each process its own alone; `joined` sees that it is.
            return "cuda:0"
        if count < self.launch.local_size:
            raise ValueError(f"device: {self.launch.local_size} processes need as many GPUs, and torch sees {count}")
        return f"cuda:{self.launch.local_rank}"

    def counts(self, n: int) -> list[int]:
        """How many of `n` items each process takes: they differ by one at most, and none is first to have nothing."""
        return [n // self.size + (rank < n % self.size) for rank in range(self.size)]

    def share(self, n: int) -> slice:
        """Which of `n` items in a row this process takes."""
        ends = [0, *itertools.accumulate(self.counts(n))]
        return slice(ends[self.rank], ends[self.rank + 1])

    def objects(self, value: Any) -> list[Any]:
        """What each process gave, by rank; small things, which are pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, error: Exception | None = None, *, stop: bool = False) -> bool:
        """Whether any process gave `stop`; where one gave an error all raise.

        Raises:
            Exception: `error`, or in a process that has none a ValueError with the message of the first that has one.
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
        """No process leaves the block before all have done it; an error (ValueError, OSError) of one is one of all."""
        error: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as raised:
            error = raised
        self.agree(error)


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """The processes that a launcher started, with its environment, for the time of the block.

    Where there is one process alone, nothing happens; where a process group is there already, it is taken. Otherwise
    the processes meet: on GPUs they exchange tensors by NCCL, on CPUs, and all that is no tensor, by gloo. Of the
    processes that leave the block with an error the first raises it, and the others end with status 1 without a word,
    so that the user reads one message; warnings come from the first process alone.

    Args:
        device: the kind of device that tensors are on, such as "cpu" or "cuda".

    Raises:
        ValueError: the environment is not as a launcher makes it, the processes do not meet, two of them see one and
            the same GPU alone, or one of them ended or did not answer within the seconds of ITM_FAST_TIMEOUT (1800);
            why it ended is said where it is known.
    """
    global _joined
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
        # Not at import: it is missing where torch was built without torch.distributed, which one process does not need.
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        store.set_timeout(timeout)
        shared = _shared_gpu(store, launch) if own_device.startswith("cuda") else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        # One that had met all others could end while another has yet to meet it.
        world.agree()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{launch.everyone} do not meet at {launch.address}: {str(error).splitlines()[0]}") from None
    _joined = True
    try:
        if shared is not None:
            raise ValueError(f"device: processes {shared[0]} and {shared[1]} see one GPU, the same; each takes its own")
        with warnings.catch_warnings():
            if not world.first:
                warnings.simplefilter("ignore")
            yield world
        world.agree()
        dist.destroy_process_group()
    except BaseException as error:
        raised = ended(error, store, launch, seconds)
        if raised is error:
            raise
        raise raised from None


def _shared_gpu(store: Any, launch: Launch) -> tuple[int, int] | None:
    """The first two processes of which each sees one GPU, and both the same; all must call this."""
    own = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.device_count() == 1 else ""
    store.set(f"{_GPU}/{launch.rank}", own)
    found: dict[str, int] = {}
    for rank in range(launch.size):
        name = store.get(f"{_GPU}/{rank}").decode()
        if name and found.setdefault(name, rank) != rank:
            return found[name], rank
    return None


def joined_before() -> bool:
    """Whether this process met others: an error that reaches the user is then the one that all of them have."""
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
        raise ValueError(f"{TIMEOUT}: expected seconds above 0, got {text!r}")
    return seconds
