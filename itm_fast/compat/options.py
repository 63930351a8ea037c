"""The options of an official training script, as a checkpoint stores them.

Inside: `Options`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from itm_fast.files.messages import shortened, shown

__all__ = ["Options"]

Value = TypeVar("Value", bool, int, float, str)
_KINDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


class Options:
    """Names and values of a checkpoint's 'opt'.

    Args:
        values: the options by name.
        source: the file, for messages.
        ignored: names that `unknown` does not return.

    Raises:
        ValueError: a name is not a string.
    """

    def __init__(self, values: Mapping[str, Any], source: str, ignored: Iterable[str] = ()) -> None:
        self._values, self._source, self._ignored = dict(values), source, set(ignored)
        self._known: set[str] = set()
        for name in self._values:
            if not isinstance(name, str):
                raise ValueError(f"{source}: opt: expected names as strings, got {shown(name)}")

    def get(self, name: str, default: Value) -> Value:
        """Return the value of an option, by default `default`; ValueError if its type is not that of `default`."""
        self._known.add(name)
        value = self._values.get(name, default)
        kind = type(default)
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            value, fits = float(value), True
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise self.error(name, f"expected {_KINDS[kind]}, got {shown(value)}")
        return value

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has this option."""
        return name in self._values

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """Map the value of an option through `choices`; ValueError with all choices if it is not one of them."""
        value = self.get(name, default)
        if value not in choices:
            raise self.error(name, f"expected one of {', '.join(choices)}, got {shown(value)}")
        return choices[value]

    def unknown(self) -> list[str]:
        """Return the options that were neither read, marked as known, nor ignored."""
        return sorted(set(self._values) - self._known - self._ignored)

    def mark_known(self, training: Iterable[str]) -> None:
        """Mark options that do not change the scores of a trained model."""
        self._known.update(training)

    def error(self, name: str, what: str) -> ValueError:
        """Return the error for an option."""
        return ValueError(f"{self._source}: opt.{shortened(name)}: {what}")
