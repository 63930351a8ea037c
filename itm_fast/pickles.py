"""Looking at pickles without unpickling them.

Inside: `has_endless_tuple`.
"""

from __future__ import annotations

import pickletools
from typing import IO

__all__ = ["has_endless_tuple"]

# Those of an honest file hold sizes, strides and the like.
_MAX_WEIGHT = 10**4
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")


def has_endless_tuple(pickle: bytes | IO[bytes]) -> bool:
    """Reads one pickle, and says whether it has a tuple of more than 10,000 values, those of tuples in it included.

    A tuple of tuples that stand in one another many times over is small in a file, but as the key of a dictionary its
    hash takes time that grows exponentially with its depth, and nothing can interrupt that.

    Raises:
        ValueError, LookupError, TypeError, OverflowError: this is no pickle.
    """
    # Of each object on the unpickler's stack, and of each that can be recalled, as how many values it counts.
    stack: list[int | None] = []
    memo: dict[int, int | None] = {}
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        place = len(memo) if argument is None else argument
        if name in _PUTS:
            memo[place] = stack[-1]
        elif name in _GETS:
            stack.append(memo[place])
        else:
            taken = _take(stack, operation.stack_before)
            weight = 1 + sum(taken) if name.startswith("TUPLE") else 1
            if weight > _MAX_WEIGHT:
                return True
            made = [None if one is pickletools.markobject else weight for one in operation.stack_after]
            stack.extend(taken * 2 if name == "DUP" else made)
    return False


def _take(stack: list[int | None], kinds: list[pickletools.StackObject]) -> list[int]:
    """Takes from the stack what an operation takes: single objects, and all above the last mark."""
    taken: list[int] = []
    if pickletools.markobject in kinds:
        while (top := stack.pop()) is not None:
            taken.append(top)
        kinds = kinds[: kinds.index(pickletools.markobject)]
    for _ in kinds:
        top = stack.pop()
        if top is None:
            raise IndexError
        taken.append(top)
    return taken
