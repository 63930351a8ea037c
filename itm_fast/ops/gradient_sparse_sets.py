"""Gradient sparsity of encoders: encode sets without a graph, and differentiate only those that the loss needs.

A loss over hard negatives sends a gradient to few of the sets that it looked at. So the forward encodes all of them and
keeps nothing but the result, and the backward encodes again, with gradient, the sets whose gradient is not zero. The
others would have contributed exactly 0. It is the counterpart of `ops.gradient_sparse`, which does so for pairs.

Inside: `gradient_sparse_sets`, `Encode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.precision import autocast_state

__all__ = ["Encode", "gradient_sparse_sets"]

# (weights, sets) -> one row for each row of the sets, or one for each set.
Encode = Callable[[Sequence[Tensor], Fragments], Tensor]


def gradient_sparse_sets(encode: Encode, weights: Sequence[Tensor], sets: Fragments, *, of_sets: bool) -> Tensor:
    """What `encode` makes of `sets`, with gradients for `weights` alone.

    Args:
        encode: draws no random numbers, changes nothing beside its result, and treats each set by itself.
        weights: what it depends on beside the sets.
        sets: rows (R, f), which receive no gradient.
        of_sets: the result has one row for each set, not for each row of the sets.

    Returns:
        (n_sets, d) or (R, d) in the dtype that `encode` gives.
    """
    refuse_transforms("gradient_sparse_sets", sets.values, *weights)
    result: Tensor = _GradientSparseSets.apply(encode, sets, of_sets, sets.values.detach(), *weights)
    return result


class _GradientSparseSets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, encode: Encode, sets: Fragments, of_sets: bool, values: Tensor, *weights: Tensor) -> Tensor:
        ctx.encode, ctx.sets, ctx.of_sets = encode, sets.with_values(values[:, :0]), of_sets
        ctx.autocast = autocast_state(values.device.type)
        ctx.save_for_backward(values, *weights)
        return encode(weights, sets.with_values(values))

    @staticmethod
    @first_order("gradient_sparse_sets")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        # A NaN is not equal to 0, either: it counts as a gradient.
        hit = (grad != 0).any(dim=1)
        if not ctx.of_sets:
            index = ctx.sets.set_index()
            hit = torch.zeros(len(ctx.sets), dtype=torch.bool, device=hit.device).index_fill(0, index[hit], True)
        chosen = hit.nonzero()[:, 0]
        nothing = (None,) * (4 + len(weights))
        if len(chosen) == 0 or not any(needed):
            return nothing
        rows = ctx.sets.row_index(chosen)
        leaves = [weight.detach().requires_grad_(wanted) for weight, wanted in zip(weights, needed, strict=True)]
        with torch.enable_grad(), ctx.autocast():
            part = ctx.encode(leaves, ctx.sets.index_select(chosen).with_values(values[rows]))
        if not part.requires_grad:
            return nothing
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        outer = grad[chosen if ctx.of_sets else rows].to(part.dtype)
        found = iter(torch.autograd.grad(part, learning, outer, allow_unused=True))
        return (*nothing[:4], *(next(found) if leaf.requires_grad else None for leaf in leaves))
