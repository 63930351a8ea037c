"""Losses whose forward also computes the gradient for an incoming gradient of 1: one call, and on CUDA one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["in_one_pass", "in_one_pass_from", "taken_gradients"]

# Limit of the CUDA kernels in rows and columns. For larger matrices, the backward computes the gradient.
UP_TO_ON_CUDA = 8192
_DEVICES = ("cpu", "cuda")


def in_one_pass(reduction: str, scores: Tensor, *others: Tensor | None) -> bool:
    """Return whether one call computes the loss of `scores` and its gradient: for a scalar loss that needs a gradient.

    Return False under `torch.compile`: its graphs may run a backward repeatedly, but the gradient is stored once.
    """
    return in_one_pass_from(reduction, scores.shape, scores, *others)


def in_one_pass_from(reduction: str, shape: Sequence[int], first: Tensor, *others: Tensor | None) -> bool:
    """Return the same for scores of this shape that are computed from these inputs."""
    device = first.device.type
    if torch.compiler.is_compiling() or device not in _DEVICES or reduction == "none":
        return False
    if (device == "cuda" and max(shape) > UP_TO_ON_CUDA) or not torch.is_grad_enabled():
        return False
    return any(part is not None and part.requires_grad for part in (first, *others))


def taken_gradients(ctx: Any, grad_loss: Tensor, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor] | None:
    """Return the gradients for an incoming gradient of 1, multiplied in place by the incoming gradient.

    The gradients are not copied, so those that the forward stored in `ctx.gradients` can be used once. Another backward
    through a retained graph calls `compute` and returns the same values.

    Returns:
        The gradients. None if the loss was not computed in one pass, or if the incoming gradients are batched
        (`torch.autograd.grad(..., is_grads_batched=True)`).
    """
    if not ctx.one_pass or _is_batched(grad_loss):
        return None
    gradients = compute() if ctx.gradients is None else ctx.gradients
    ctx.gradients = None
    for gradient in gradients:
        if gradient.numel() > 0:
            torch.ops.itm_fast.scale_gradient(gradient, grad_loss)
    return gradients


def _is_batched(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
