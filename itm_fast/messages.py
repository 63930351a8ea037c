"""Values and texts of unknown files in error messages: bounded in length, and in the time and memory that it takes.

Inside: `shown`, `shortened`.
"""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

__all__ = ["shortened", "shown"]

_MAX_LENGTH = 100
# Writing out larger integers takes time that grows with the square of their length; Python itself refuses most.
_MAX_BITS = 10_000


def shortened(text: str, limit: int = _MAX_LENGTH) -> str:
    """`text`; of one of more than `limit` characters the first 60 percent of as many, and how many it has."""
    return text if len(text) <= limit else f"{text[: limit * 3 // 5]}... ({len(text)} characters)"


def shown(value: Any) -> str:
    """A value as Python writes it, cut where it is long.

    A list that holds one list many times over is small in a file and in memory, but endless when it is written out: of
    containers no more than a few items of a few levels are looked at, and of other objects only the type.
    """
    return shortened(repr(value) if isinstance(value, str) else _SHORT.repr(value))


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = 4
        self.maxstring = _MAX_LENGTH

    def repr1(self, value: Any, level: int) -> str:
        known = type(value) in (str, int, list, tuple, dict)
        return super().repr1(value, level) if known else self.repr_instance(value, level)

    def repr_int(self, value: int, _level: int) -> str:
        return repr(value) if value.bit_length() <= _MAX_BITS else "a number of too many digits"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Unlike the inherited one it compares no keys."""
        if value and level <= 0:
            return "{...}"
        pairs = itertools.islice(value.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in pairs]
        return f"{{{', '.join(parts + ['...'] * (len(value) > self.maxdict))}}}"

    def repr_instance(self, value: Any, _level: int) -> str:
        return repr(value) if isinstance(value, float | bool | None) else f"<{type(value).__name__}>"


_SHORT = _Short()
