"""Compare a training state from a file with the state that this configuration would save.

Inside: `MayLack`, `check_like`, `check_equal`, `check_progress`, `check_summary`.

Every difference raises a ValueError with one line that names the entry, such as `optimizer.param_groups.0.eps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor

from itm_fast.files.messages import shown
from itm_fast.models.weights_file import check_finite

__all__ = ["MayLack", "check_equal", "check_like", "check_progress", "check_summary"]


@attrs.frozen(eq=False)
class MayLack:
    """For `check_like`: an entry that a state may lack; if it is there, it is like `expected`."""

    expected: Any


def check_like(value: Any, expected: Any, name: str) -> None:
    """Check that `value` has the keys, lengths, types, shapes and strides of `expected`, and finite numbers.

    A tensor may have the values of `expected` that are not finite at the same places.

    The tensors of `value` are on the CPU; those of `expected` may be on any device.
    """
    if isinstance(expected, MayLack):
        check_like(value, expected.expected, name)
    elif isinstance(expected, Tensor):
        _check_tensor(value, expected, name)
    elif isinstance(expected, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected names and values, got {shown(value)}")
        for key in value:
            if key not in expected:
                raise ValueError(f"{name}: {shown(key)} is unknown")
        for key, part in expected.items():
            if key in value:
                check_like(value[key], part, f"{name}.{key}")
            elif not isinstance(part, MayLack):
                raise ValueError(f"{name}: {key!r} is missing")
    elif type(value) is not type(expected) or (isinstance(value, float) and not math.isfinite(value)):
        kind = "a finite number" if isinstance(expected, float) else f"a value of type {type(expected).__name__}"
        raise ValueError(f"{name}: expected {kind}, got {shown(value)}")
    elif isinstance(expected, list | tuple):
        if len(value) != len(expected):
            raise ValueError(f"{name}: expected {len(expected)} values, got {len(value)}")
        for index, (item, part) in enumerate(zip(value, expected, strict=True)):
            check_like(item, part, f"{name}.{index}")


def check_equal(values: Mapping[str, Any], expected: Mapping[str, Any], name: str, free: Iterable[str] = ()) -> None:
    """Check that plain values are equal by name; those in `free` may differ."""
    for key, value in expected.items():
        if key not in free and values[key] != value:
            raise ValueError(f"{name}.{key}: expected {shown(value)}, got {shown(values[key])}")


def check_progress(state: Mapping[str, Any]) -> None:
    """Check the trainer's own entries: the losses since the last line of the log, and the validations."""
    for index, loss in enumerate(state["window"]):
        check_like(loss, 0.0, f"window.{index}")
    for name in ("best_step", "validated_step"):
        if state[name] > state["position"]:
            raise ValueError(f"{name}: expected at most the position, {state['position']}, got {state[name]}")
    if state["best"]:
        check_summary(state["best"], "best")


def check_summary(summary: Mapping[Any, Any], name: str) -> None:
    """Check that the summary of a validation maps names to numbers and includes the sum of recalls."""
    for key, value in summary.items():
        fits = isinstance(key, str) and type(value) in (int, float) and abs(value) < math.inf
        if not fits:
            raise ValueError(f"{name}: expected finite numbers by name, got {shown({key: value})}")
    if "rsum" not in summary:
        raise ValueError(f"{name}: 'rsum' is missing")


def _check_tensor(value: Any, expected: Tensor, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {shown(value)}")
    # Kernels trust sizes and strides, and torch checks neither when it loads the state of an optimiser.
    for what in ("dtype", "shape"):
        found, wanted = getattr(value, what), getattr(expected, what)
        if found != wanted:
            found, wanted = (tuple(one) if what == "shape" else one for one in (found, wanted))
            raise ValueError(f"{name}: expected {what} {wanted}, got {found}")
    if value.stride() != expected.stride():
        raise ValueError(f"{name}: expected values with strides {expected.stride()}, got {value.stride()}")
    check_finite(value, name, expected)
