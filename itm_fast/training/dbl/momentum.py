"""The momentum synchronous scenario of Deep Boosting Learning: the anchor is the moving average of the target.

Inside: `MomentumScenario`, `momentum_at`, `kept_share`.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from itm_fast.models.base import MatchingModel
from itm_fast.training.branch import Branch
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult

__all__ = ["MomentumScenario", "kept_share", "momentum_at"]


def momentum_at(step: int, steps: int, first: float) -> float:
    """Return the momentum of the average at step `step` (from 0) of `steps`: it rises from `first` to 1.

    `1 - (1 - first) (1 + cos(pi step / steps)) / 2`, the cosine schedule of Deep Boosting Learning, section III-C.
    """
    return 1.0 - (1.0 - first) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def kept_share(steps: int, first: float) -> float:
    """Return the weight that the initial weights still have in the average after `steps` steps, which shows whether it
    moves.
    """
    return math.prod(momentum_at(step, steps, first) for step in range(steps))


class MomentumScenario(Scenario):
    """MSS: the anchor starts as a copy of the target and moves slightly towards it after each step (Eq 22).

    Parameters and floating point buffers are averaged, including the statistics of batch normalization. Integer buffers
    are copied from the target, and so are values of buffers that are not finite, such as those of a mask.

    Args:
        target: the branch that learns.
        boosting_weight: as in `Scenario`.
        momentum: momentum of the average at the first step, within [0, 1].
        steps: number of optimiser steps of the whole training.

    Raises:
        ValueError: the momentum is out of bounds.
    """

    def __init__(self, target: Branch, boosting_weight: float, momentum: float, steps: int) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected a number within [0, 1], got {momentum}")
        self.average = copy.deepcopy(target.model)
        for module in self.average.modules():
            if isinstance(module, nn.RNNBase):
                # Copied weights are not contiguous, so cuDNN would gather them, with a warning, at every call.
                module.flatten_parameters()
        super().__init__([target], boosting_weight, self.average)
        self.momentum, self.steps = momentum, steps

    def companions(self) -> list[MatchingModel]:
        """Return the average, which is saved with the target."""
        return [self.average]

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        momentum = momentum_at(self.target.steps, self.steps, self.momentum)
        result = super().step(batch, number)
        with torch.no_grad():
            new, moved = self.target.model.state_dict(), set()
            buffers = dict(self.average.named_buffers())
            for name, average in self.average.state_dict().items():
                if average.data_ptr() in moved:  # A tied weight has several names.
                    continue
                moved.add(average.data_ptr())
                if average.is_floating_point():
                    average.lerp_(new[name], 1.0 - momentum)
                    if name in buffers:
                        average.copy_(torch.where(new[name].isfinite(), average, new[name]))
                else:
                    average.copy_(new[name])
        return result
