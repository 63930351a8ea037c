"""The learning rate as a function of only the step, so that a resumed run needs nothing but its position."""

from __future__ import annotations

import math

from itm_fast.training.config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimiser step `step` (from 0).

    During the first `lr_warmup_steps` steps a linear ramp multiplies the schedule. The floor is a lower bound of the
    schedule.
    """
    if config.lr_schedule == "step":
        unit = steps_per_epoch if config.lr_decay_unit == "epoch" else 1
        factor = config.lr_decay_factor ** (step // (config.lr_decay_every * unit))
    elif config.lr_schedule in ("cosine", "linear"):
        total = config.epochs * steps_per_epoch - config.lr_warmup_steps
        done = min(max(step - config.lr_warmup_steps, 0) / max(total, 1), 1.0)
        factor = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        factor = 1.0
    rate = max(config.lr * factor, min(config.lr_floor, config.lr))
    return rate * min((step + 1) / config.lr_warmup_steps, 1.0) if config.lr_warmup_steps else rate
