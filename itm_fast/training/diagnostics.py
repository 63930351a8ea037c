"""Whether a gradient vanishes, and which negatives a loss takes: what SelHN and RVSE++ looks at during training.

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
    """How far the hardest negatives score from the positives, and how many anchors take theirs.

    Args:
        scores: (B, B) without gradient, positives on the diagonal, image-to-text over a row.
        positives: bool (B, B), True for pairs that are no negatives; None: the diagonal alone.
        mining: as of `itm_fast.functional.triplet_loss`. "hardest" and "sct" always take the hardest negative,
            "all" never does, "semi_hard" does where that scores below the positive, "selective" where it scores further
            than epsilon from it.
        epsilon: threshold of "selective".

    Returns:
        `i2t_hardest_share` and `t2i_hardest_share`, within [0, 1], and `hardest_gap`, the mean of
        `|s_hardest - s_positive|` over the anchors of both directions. Anchors without a negative count in neither; a
        number that no anchor is left for is missing.

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
    """Fills the dictionary that it gives with `image_grad_norm` when the block ends, if that has a backward pass.

    It is the norm of the gradient of `model.first_image_weight()` as the backward pass leaves it, whatever clips it
    then. It is missing where no gradient came (the weight may be frozen), or one that is not finite; and always where
    not `enabled`. `after_backward` are calls that the caller makes after a backward pass, where the gradient is whole
    then alone: several processes add it up.

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
