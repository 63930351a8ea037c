"""Compute with float32 what float16 cannot represent.

Inside: `float16_in_float32`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["float16_in_float32"]

Function = TypeVar("Function", bound=Callable[..., Tensor])


def float16_in_float32(function: Function) -> Function:
    """Convert float16 arguments of an operator to float32, and its result back.

    The constant 1e-8 that keeps quotients finite is zero in float16.
    """

    @functools.wraps(function)
    def widened(queries: Any, contexts: Any, *arguments: Any, **options: Any) -> Tensor:
        if queries.dtype != torch.float16:
            return function(queries, contexts, *arguments, **options)
        arguments = tuple(map(_float32, (queries, contexts, *arguments)))
        return function(*arguments, **{name: _float32(value) for name, value in options.items()}).to(torch.float16)

    return widened  # type: ignore[return-value]


def _float32(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_float32, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_float32(part) for part in value]
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value
    return value.to(torch.float32) if hasattr(value, "to") else value
