"""Diagnostics of SelHN and RVSE++: vanishing gradients, and the negatives that a loss uses.

Inside: `mining_diagnostics`, `image_gradient_norm`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.models.base import MatchingModel

__all__ = ["image_gradient_norm", "mining_diagnostics"]


def mining_diagnostics(scores: Tensor, positives: Tensor | None, mining: str, epsilon: float) -> dict[str, float]:
    """Measure the gap of the hardest negatives to the positives, and the share of anchors that use them.

    Args:
        scores: (B, B) without gradient: images are rows, positives are on the diagonal.
        positives: bool (B, B), True for pairs that are not negatives; None: only the diagonal.
        mining: as in `itm_fast.functional.triplet_loss`. "hardest" and "sct" always use the hardest negative, "all"
            never does. "semi_hard" does if it scores below the positive, "selective" if its score differs from the
            positive's by more than epsilon.
        epsilon: threshold of "selective".

    Returns:
        `i2t_hardest_share` and `t2i_hardest_share`, within [0, 1], and `hardest_gap`, the mean of
        `|s_hardest - s_positive|` over the anchors of both directions. Anchors without a negative do not count; a
        number without any anchor is missing.

    Source: Figures 3d, 5d and 7 of SelHN and RVSE++ (delta s, Eq 10; the share of Eq 9's first line).
    """
    own = scores.diagonal().to(torch.promote_types(scores.dtype, torch.float32))
    shares, gaps, counts = [], [], []
    for hardest, _ in F_itm.hardest_negatives(scores, positives):
        gap = (hardest - own).abs()
        counted = gap.isfinite()
        if mining == "selective" and epsilon > 0:
            taken = gap > epsilon
        elif mining == "semi_hard":
            taken = hardest < own
        else:
            taken = torch.full_like(counted, mining != "all")
        shares.append((taken & counted).sum(dtype=gap.dtype))
        gaps.append(gap.masked_fill(~counted, 0.0).sum())
        counts.append(counted.sum(dtype=gap.dtype))
    # One transfer from the device for all numbers.
    numbers = torch.stack([*shares, *gaps, *counts]).tolist()
    (rows, columns), gap_sum, (n_rows, n_columns) = numbers[:2], sum(numbers[2:4]), numbers[4:]
    named = {
        "i2t_hardest_share": (rows, n_rows),
        "t2i_hardest_share": (columns, n_columns),
        "hardest_gap": (gap_sum, n_rows + n_columns),
    }
    return {name: total / count for name, (total, count) in named.items() if count}


@contextlib.contextmanager
def image_gradient_norm(
    model: MatchingModel, *, enabled: bool = True, after_backward: list[Callable[[], None]] | None = None
) -> Iterator[dict[str, float]]:
    """Measure the gradient norm of the first image layer in a block with a backward pass.

    The yielded dictionary gets `image_grad_norm` at the end of the block: the norm of the gradient of
    `model.first_image_weight()` before clipping. It stays empty if there is no gradient (the weight may be frozen), if
    the norm is not finite, or if not `enabled`. With several processes, the gradient is complete only after they have
    added it up: `after_backward` then lists the functions that the caller calls at that point.

    Source: Figures 3b and 5b of SelHN and RVSE++ ("gradient of the FC layer").
    """
    found: dict[str, float] = {}
    first = model.first_image_weight()
    if not (enabled and first.requires_grad):
        yield found
        return
    norms: list[Tensor] = []

    def note(weight: Tensor) -> None:
        # Kept on the device: the backward pass waits for nothing.
        if weight.grad is not None:
            norms.append(torch.linalg.vector_norm(weight.grad.float()))

    with contextlib.ExitStack() as stack:
        if after_backward is None:
            stack.callback(first.register_post_accumulate_grad_hook(note).remove)
        else:
            after_backward.append(partial(note, first))
            stack.callback(after_backward.pop)
        yield found
    if norms and math.isfinite(norm := float(norms[-1])):
        found["image_grad_norm"] = norm
