"""Adam on some rows of a table, each with a number of steps of its own.

Inside: `adam_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["adam_rows"]


def adam_rows(
    values: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Sequence[int],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One step in place, on float32 tensors (U, d): what `torch.optim.Adam` does to each row, bit for bit.

    Args:
        values: the parameters.
        gradients: theirs.
        exp_avg, exp_avg_sq: their moments before the step.
        steps: of each row, how many it has done when this one is counted, from 1.
        lr, beta1, beta2, eps: as in `torch.optim.Adam`.
    """
    exp_avg.lerp_(gradients, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    # Corrections in Python's numbers, rounded to float32 once, as torch does it.
    rates = _column([-(lr / (1 - beta1**step)) for step in steps])
    corrections = _column([(1 - beta2**step) ** 0.5 for step in steps])
    values.add_((rates * exp_avg).div_((exp_avg_sq.sqrt() / corrections).add_(eps)))


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]
