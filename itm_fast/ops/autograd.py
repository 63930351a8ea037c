"""Helpers of the autograd Functions, which support first derivatives in reverse mode and raise for all others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["first_order", "is_differentiated", "refuse_transforms"]

_ADVICE = "use itm_fast.reference, which is plain PyTorch"


def is_differentiated(*tensors: Tensor) -> bool:
    """Return whether a result of these tensors needs a derivative, or a `torch.func` transform is active."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return True
    # torch.compile cannot trace these calls.
    return not torch.compiler.is_compiling() and (_transformed() or _has_tangent(tensors))


def _transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _has_tangent(tensors: Iterable[Tensor]) -> bool:
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(part).tangent is not None for part in tensors)


def refuse_transforms(operator: str, *tensors: Tensor) -> None:
    """Raise inside `torch.func` transforms and for forward-mode tangents, which native operators do not support."""
    # torch.compile cannot trace these checks, and itself rejects such transforms of autograd Functions.
    if torch.compiler.is_compiling():
        return
    if _transformed():
        raise RuntimeError(f"{operator} does not support torch.func transforms: {_ADVICE}")
    if _has_tangent(tensors):
        raise RuntimeError(f"{operator} does not support forward-mode differentiation: {_ADVICE}")


class _SecondDerivative(torch.autograd.Function):
    """Return gradients unchanged; raise in the backward, so that second derivatives are an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(f"{ctx.operator} does not support second derivatives: {_ADVICE}")


def first_order(operator: str) -> Callable[[Callable[..., Any]], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorate a `backward` whose result must not be differentiated again.

    `torch.autograd.function.once_differentiable` treats the result as a constant if the incoming gradient requires no
    gradient. This decorator also marks the result as a function of the saved inputs. A gradient penalty then raises an
    error instead of missing a term. The inputs must be saved with `ctx.save_for_backward`.

    The decorated function is called as `backward(ctx, saved, *grads)`: activation checkpointing lets saved tensors be
    read once.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            return _SecondDerivative.apply(operator, len(results), *results, *saved, *grads)

        return wrapper

    return decorate
