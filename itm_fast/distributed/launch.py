"""What torchrun, or another launcher, tells the processes that it starts: numbers in their environment.

Inside: `Launch`, `launched`. Nothing here needs torch.
"""

from __future__ import annotations

import os

import attrs

__all__ = ["Launch", "launched"]


@attrs.frozen
class Launch:
    """Which of the processes of a run this one is.

    Attributes:
        rank, size: its number among all, from 0, and how many they are.
        local_rank, local_size: the same among those of its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def everyone(self) -> str:
        """All of them, in messages."""
        return f"the {self.size} processes of this run"

    @property
    def address(self) -> str:
        """Where the processes meet."""
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def launched() -> Launch:
    """What the environment says: the only process where it does not have both RANK and WORLD_SIZE.

    Raises:
        ValueError: a variable is missing or no number that fits; it is named.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return Launch()
    size = _number("WORLD_SIZE", 1, None)
    rank = _number("RANK", 0, size - 1)
    local_size = _number("LOCAL_WORLD_SIZE", 1, size, default=size)
    local_rank = _number("LOCAL_RANK", 0, local_size - 1, default=rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not os.environ.get(name):
            raise ValueError(f"{name}: expected in the environment beside WORLD_SIZE, as torchrun sets it")
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
