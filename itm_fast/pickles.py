"""Looking at pickles without unpickling them.

Inside: `check_pickle`, `RefusedError`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Container
from typing import IO, Any

import attrs

from itm_fast.messages import shortened

__all__ = ["RefusedError", "check_pickle"]

# Those of an honest file hold sizes, strides and the like.
_MAX_WEIGHT = 10**4
_GETS = ("BINGET", "LONG_BINGET")
_PUTS = ("BINPUT", "LONG_BINPUT")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS")
_CALLS = ("REDUCE", "NEWOBJ", "BUILD")


class RefusedError(ValueError):
    """A pickle that could be read, but should not be; the message says why."""


@attrs.define(eq=False)
class _Value:
    """What is known of a value: how many a hash of it visits, how many lie in it, and the parts of a tuple."""

    weight: int = 1
    items: int = 0
    parts: list[_Value] | None = None
    text: str | None = None


def check_pickle(pickle: bytes | IO[bytes], allowed: Container[str], keys: Container[str] | None = None) -> None:
    """Reads one pickle and looks for what `torch.load` lets through although it harms.

    That are functions that make much out of little (`bytearray(10**12)`); containers that are copied over and over; a
    storage that is read over and over under several keys; and tuples of tuples that stand in one another many times
    over, whose hash, as the key of a dictionary, takes time that grows exponentially with their depth.

    Args:
        pickle: the bytes, or a file that stands at their start and afterwards behind them.
        allowed: classes and functions that it may name, as `collections.OrderedDict`.
        keys: keys of storages that there are; None: any will do.

    Raises:
        RefusedError: it names anything else, or holds one of these.
        ValueError, LookupError, TypeError, OverflowError: this is no pickle of torch.
    """
    # None is a mark on the stack.
    stack: list[_Value | None] = []
    memo: dict[int, _Value | None] = {}
    operations = copies = 0
    argument: Any
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        operations += 1
        if name in _PUTS:
            memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name in _FILLS:
            taken = _take(stack, operation.stack_before[1:])
            (target,) = _take(stack, operation.stack_before[:1])
            target.items += len(taken)
            stack.append(target)
        elif name in _CALLS:
            target, arguments = _take(stack, operation.stack_before)
            if name != "BUILD" and arguments.parts is None:
                raise ValueError
            size = arguments.items + sum(part.items for part in arguments.parts or ())
            copies += size
            stack.append(target if name == "BUILD" else _Value(items=size))
        elif name == "BINPERSID":
            (identity,) = _take(stack, operation.stack_before)
            if identity.parts is None or (keys is not None and identity.parts[2].text not in keys):
                raise ValueError
            stack.append(_Value())
        else:
            if name == "GLOBAL" and (found := argument.replace(" ", ".")) not in allowed:
                raise RefusedError(
                    f"holds the Python object {shortened(found)}, which does not belong there; nothing of it was run"
                )
            taken = _take(stack, operation.stack_before)
            if name.startswith("TUPLE") or name == "EMPTY_TUPLE":
                value = _Value(1 + sum(part.weight for part in taken), len(taken), taken)
            else:
                value = _Value(text=argument if isinstance(argument, str) else None)
            if value.weight > _MAX_WEIGHT:
                raise RefusedError("holds a tuple of tuples that is out of all proportion to the file")
            stack += [None if one is pickletools.markobject else value for one in operation.stack_after]
    # An honest pickle fills a container value by value, and uses it once.
    if copies > operations:
        raise RefusedError("copies its values out of all proportion to the file")


def _take(stack: list[_Value | None], kinds: list[pickletools.StackObject]) -> list[_Value]:
    """Takes from the stack what an operation takes, lowest first: single values, and all above the last mark."""
    taken: list[_Value] = []
    if pickletools.markobject in kinds:
        while (top := stack.pop()) is not None:
            taken.append(top)
        kinds = kinds[: kinds.index(pickletools.markobject)]
    for _ in kinds:
        top = stack.pop()
        if top is None:
            raise IndexError
        taken.append(top)
    return taken[::-1]
