"""Truncate untrusted values in error messages, in bounded time and memory."""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

__all__ = ["printable", "shortened", "shown"]

_MAX_LENGTH = 100
# Converting larger integers to text takes quadratic time; Python itself refuses most of them.
_MAX_BITS = 10_000


def printable(text: str) -> str:
    """Return `text` with control characters and other unprintable ones escaped, as in `\\x1b`."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shortened(text: str, limit: int = _MAX_LENGTH) -> str:
    """Return `text`. Cut one of more than `limit` characters to 60 % of `limit`, and append its length."""
    return text if len(text) <= limit else f"{text[: limit * 3 // 5]}... ({len(text)} characters)"


def shown(value: Any) -> str:
    """Return the `repr` of a value, truncated.

    A list that contains the same list many times is small in memory but huge as text. So only a few items and levels
    of a container are visited, and only the type of other objects is shown.
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
        return repr(value) if value.bit_length() <= _MAX_BITS else "a number with too many digits"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Show the first items without sorting the keys, which need not be comparable."""
        if value and level <= 0:
            return "{...}"
        pairs = itertools.islice(value.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in pairs]
        return f"{{{', '.join(parts + ['...'] * (len(value) > self.maxdict))}}}"

    def repr_instance(self, value: Any, _level: int) -> str:
        return repr(value) if isinstance(value, float | bool | None) else f"<{type(value).__name__}>"


_SHORT = _Short()
