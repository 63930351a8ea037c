"""Read rank and size from the environment variables of torchrun or another launcher.

Inside: `Launch`, `launched`. This module does not import torch.
"""

from __future__ import annotations

import os

import attrs

__all__ = ["Launch", "launched"]


@attrs.frozen
class Launch:
    """Rank of this process and number of processes.

    Attributes:
        rank: rank among all processes, from 0.
        size: number of all processes.
        local_rank: rank among the processes of this machine, from 0.
        local_size: number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def everyone(self) -> str:
        """Return the phrase for all processes in messages."""
        return f"the {self.size} processes of this run"

    @property
    def address(self) -> str:
        """Return host and port of the rendezvous."""
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def launched() -> Launch:
    """Read the environment; without RANK or WORLD_SIZE return a single process.

    Raises:
        ValueError: a variable is missing or is not a number within its range.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return Launch()
    size = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, size - 1)
    local_size = _number("LOCAL_WORLD_SIZE", 1, size, default=size)
    local_rank = _number("LOCAL_RANK", 0, local_size - 1, default=rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not os.environ.get(name):
            raise ValueError(f"{name}: missing in the environment; torchrun sets it together with WORLD_SIZE")
    return Launch(rank, size, local_rank, local_size)


def _number(name: str, least: int, most: int | None, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    number = int(text) if text is not None and text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"a number from {least} to {most}"
        raise ValueError(f"{name}: expected {wanted} in the environment, as torchrun sets it, got {text!r}")
    return number
