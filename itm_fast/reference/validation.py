"""Argument checks shared by the public functions.

Every error is one line, "<argument>: expected <requirement>, got <value>": `TypeError` for a wrong type or dtype,
`ValueError` for a wrong shape, device or value. The checks read shapes and dtypes, never tensor values. They do not
synchronize with the GPU, and `torch.compile` traces them.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from itm_fast.fragments import Fragments

__all__ = [
    "FLOATING",
    "INTEGER",
    "check_count",
    "check_flag",
    "check_fragments",
    "check_option",
    "check_same_device",
    "check_shape",
    "check_sizes",
    "check_tensor",
    "debug_checks",
    "debugging",
    "describe",
    "finite_number",
]

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER = (torch.int32, torch.int64)
# Kernels compute in float32. Up to this size, an option divided by a norm plus 1e-8 does not overflow.
_LARGEST = 1e30
_SMALLEST = torch.finfo(torch.float32).tiny


def describe(value: object) -> str:
    """Describe a value for an error message: dtype and shape of a tensor, otherwise the value and its type."""
    if isinstance(value, Tensor):
        dtype = _name(value.dtype)
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_tensor(name: str, value: object, shape: tuple[str, ...], dtypes: Sequence[torch.dtype] = FLOATING) -> None:
    """Raise unless `value` is a dense tensor of one of `dtypes`, with the dimensions named in `shape`: `("n", "m")`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {_shape(shape)}, got {describe(value)}")
    if value.dtype not in dtypes:
        expected = " or ".join(_name(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected a tensor of dtype {expected}, got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got the layout {value.layout}")
    if value.dim() != len(shape):
        raise ValueError(f"{name}: expected shape {_shape(shape)}, got {describe(value)}")


def check_fragments(name: str, value: object) -> None:
    """Raise TypeError unless `value` is `Fragments`; for tensors and lists the message says how to make them."""
    if isinstance(value, Fragments):
        return
    found = describe(value)
    if isinstance(value, Tensor):
        found += "; pack padded sets by Fragments.from_padded(padded, lengths)"
    elif isinstance(value, list | tuple):
        found = f"a {type(value).__name__}; pack a list of sets by Fragments.from_list(sets)"
    raise TypeError(f"{name}: expected Fragments, got {found}")


def check_shape(name: str, value: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise unless the shape is `expected`; `meaning` explains the expected shape in the message."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)} {meaning}, got {tuple(value.shape)}")


def check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise if the two tensors are on different devices."""
    if value.device != other.device:
        raise ValueError(f"{name}: expected it on {other.device} like {other_name}, got {value.device}")


def finite_number(
    name: str,
    value: object,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    non_zero: bool = False,
) -> float:
    """Return `value` as a float. Raise unless it is a finite real number within the bounds."""
    # Test for float first: it is the usual type, and torch.compile may make it symbolic.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{name}: expected a finite number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        number = float("inf")
    # NaN or infinity minus itself is NaN. math.isfinite does not accept symbolic numbers.
    if number - number != 0.0:
        raise ValueError(f"{name}: expected a finite number, got {number}")
    if number > _LARGEST or number < -_LARGEST:
        raise ValueError(f"{name}: expected a number of at most {_LARGEST:g} in size, got {number}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}: expected a number of at least {minimum:g}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}: expected a number of at most {maximum:g}, got {number}")
    if non_zero and -_SMALLEST < number < _SMALLEST:
        raise ValueError(f"{name}: expected a number other than 0, got {number}")
    return number


def check_count(name: str, value: object, minimum: int = 0) -> None:
    """Raise ValueError unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < minimum:
        raise ValueError(f"{name}: expected a whole number of at least {minimum}, got {value!r}")


def check_sizes(**sizes: object) -> None:
    """Raise ValueError unless each size, by the name of its argument, is a whole number of at least 1."""
    for name, size in sizes.items():
        check_count(name, size, minimum=1)


def check_option(name: str, value: object, options: Sequence[str | None]) -> None:
    """Raise unless `value` is one of `options`."""
    if not (value is None or isinstance(value, str)) or value not in options:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name}: expected one of {', '.join(map(repr, options))}, got {describe(value)}")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(names: tuple[str, ...]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


_debugging = False


def debug_checks(enabled: bool) -> None:
    """Enable or disable checks of tensor values (offsets, image indices) in all operators. They synchronize the GPU."""
    global _debugging
    check_flag("enabled", enabled)
    _debugging = enabled


def debugging() -> bool:
    """Return whether `debug_checks` is enabled."""
    return _debugging
