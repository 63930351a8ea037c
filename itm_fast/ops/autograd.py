"""What the autograd Functions of the package share: first derivatives in reverse mode, and a clear word on the rest.

Inside: `first_order`, `is_differentiated`, `refuse_transforms`.
"""

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
    """Whether a result of these tensors will have a derivative of any kind, or a `torch.func` transform is active."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return True
    # torch.compile does not trace these questions.
    return not torch.compiler.is_compiling() and (_transformed() or _has_tangent(tensors))


def _transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _has_tangent(tensors: Iterable[Tensor]) -> bool:
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(part).tangent is not None for part in tensors)


def refuse_transforms(operator: str, *tensors: Tensor) -> None:
    """Raises inside `torch.func` transforms and for forward-mode tangents, which native operators do not support."""
    # torch.compile does not trace the questions, and refuses such transforms of autograd Functions by itself.
    if torch.compiler.is_compiling():
        return
    if _transformed():
        raise RuntimeError(f"{operator} does not support torch.func transforms: {_ADVICE}")
    if _has_tangent(tensors):
        raise RuntimeError(f"{operator} does not support forward-mode differentiation: {_ADVICE}")


class _SecondDerivative(torch.autograd.Function):
    """The identity on gradients; its own derivative is the error that a second derivative deserves."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(f"{ctx.operator} does not support second derivatives: {_ADVICE}")


def first_order(operator: str) -> Callable[[Callable[..., Any]], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorates a `backward` whose result must not be differentiated again.

    Unlike `torch.autograd.function.once_differentiable`, which lets a gradient pass as a constant where the incoming
    gradient needs none itself, this marks the result as a function of the saved inputs too, so that a gradient penalty
    is an error and never a silently missing term. The inputs must have been saved by `ctx.save_for_backward`.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            return _SecondDerivative.apply(operator, len(results), *results, *ctx.saved_tensors, *grads)

        return wrapper

    return decorate
