"""Losses whose forward writes their gradient too, in one launch, for an incoming gradient of 1.

Inside: `in_one_launch`, `taken_gradients`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["in_one_launch", "taken_gradients"]

# Rows and columns that the kernels take; for larger matrices the backward writes the gradient.
UP_TO = 8192
_DEVICES = ("cuda",)


def in_one_launch(reduction: str, scores: Tensor, *others: Tensor | None) -> bool:
    """Whether the loss of `scores` and its gradient come from one launch: where it is one number to be differentiated.

    Not under `torch.compile`, whose graphs may run a backward as often as they like: the gradient is there once.
    """
    if torch.compiler.is_compiling() or scores.device.type not in _DEVICES or reduction == "none":
        return False
    if max(scores.shape) > UP_TO or not torch.is_grad_enabled():
        return False
    return any(part is not None and part.requires_grad for part in (scores, *others))


def taken_gradients(ctx: Any, grad_loss: Tensor) -> list[Tensor] | None:
    """The gradients that the forward left in `ctx.gradients`, multiplied in place by the incoming gradient.

    They can be taken once, for they are handed out as they are. None where there are none, or no longer.
    """
    gradients: list[Tensor] | None = ctx.gradients
    if gradients is not None:
        ctx.gradients = None
        for gradient in gradients:
            torch.ops.itm_fast.scale_gradient(gradient, grad_loss)
    return gradients
