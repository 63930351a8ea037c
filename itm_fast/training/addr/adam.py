"""Adam on selected rows of a table, with a step count for each row.

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
    """Run one step in place on float32 tensors (U, d), bit for bit as `torch.optim.Adam` would on each row.

    Args:
        values: the parameters.
        gradients: the gradients of the parameters.
        exp_avg, exp_avg_sq: Adam's moments before the step.
        steps: for each row, the number of its step, counted from 1.
        lr, beta1, beta2, eps: as in `torch.optim.Adam`.
    """
    exp_avg.lerp_(gradients, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    # Like torch, compute the corrections in Python floats and round them to float32 once.
    rates = _column([-(lr / (1 - beta1**step)) for step in steps])
    corrections = _column([(1 - beta2**step) ** 0.5 for step in steps])
    values.add_((rates * exp_avg).div_((exp_avg_sq.sqrt() / corrections).add_(eps)))


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]
