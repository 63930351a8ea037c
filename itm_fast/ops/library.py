"""Loads the native library and says which path serves what.

``use_native`` is asked by every operator; ``build_info`` reports what was found.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

Fake = TypeVar("Fake", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parents[1]
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FallbackWarning(UserWarning):
    """The packed reference serves an operator because no native kernel can."""


def _registered_operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("itm_fast::"))


def _load(name: str) -> str | None:
    """Loads ``itm_fast/<name>.so``; returns None, or why it was not loaded."""
    if os.environ.get("ITM_FAST_NATIVE", "1") == "0":
        return "ITM_FAST_NATIVE=0"
    path = _PACKAGE / f"{name}.so"
    if not path.exists():
        return "no native library was built"
    torch.ops.load_library(str(path))
    return None


_missing_cpu = _load("_C_cpu")
# Listing the dispatcher's operators takes a millisecond, so it is done once.
_operators = frozenset(_registered_operators())


def register_fake(operator: str) -> Callable[[Fake], Fake]:
    """`torch.library.register_fake` for an operator of the native library; does nothing where that is not loaded."""
    name = f"itm_fast::{operator}"
    return torch.library.register_fake(name) if name in _operators else lambda fake: fake


def use_native(operator: str, tensor: torch.Tensor) -> bool:
    """True where a native kernel of ``operator`` serves the device and dtype of ``tensor``; else warns, once a cause."""
    if tensor.device.type != "cpu":
        cause = f"no native kernel for device '{tensor.device.type}'"
    elif _missing_cpu is not None:
        cause = _missing_cpu
    elif tensor.dtype not in _CPU_DTYPES:
        cause = f"no native kernel for {tensor.dtype}"
    elif f"itm_fast::{operator}" not in _operators:
        cause = f"the native library holds no operator '{operator}'"
    else:
        return True
    _warn_once(cause)
    return False


_warned: set[str] = set()


def _warn_once(cause: str) -> None:
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(f"itm_fast runs on the packed reference: {cause}", FallbackWarning, stacklevel=3)
