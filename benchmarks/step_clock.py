"""Measure the time of a training step by phase: waiting for data, encoders, scoring, loss, optimiser.

Inside: `PHASES`, `StepClock`, `watch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.training.step import Stepper

__all__ = ["PHASES", "StepClock", "watch"]

# In the order of a step. Encoders, scoring and loss include their backward; the batch phase augments the batch and
# copies it to the device; the optimiser phase includes clipping.
PHASES = ("waiting", "batch", "encoder", "scoring", "loss", "optimizer")


class StepClock:
    """Adds up the seconds of each phase.

    Attributes:
        seconds: by phase, since the last `reset`.
        synchronize: called before the time is read. On an asynchronous device a phase ends when the device has
            finished its work.
        since: when the current phase began, or the last one ended, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.synchronize: Callable[[], object] = lambda: None
        self.reset()

    def reset(self) -> None:
        """Reset the times, outside of any phase."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self.since = 0.0

    def switch(self, phase: str | None) -> None:
        """End the current phase and begin another one; None: no phase."""
        self.synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self.since
        self._phase, self.since = phase, now


def watch(model: MatchingModel, stepper: Stepper, clock: StepClock) -> None:
    """Make the steps of `stepper` on `model` switch the clock; the caller switches to "waiting" and "batch".

    The gradient of an embedding, of the scores or of a loss marks the start of the backward of the module that computed
    it. Only for scenarios of one branch.
    """
    score, auxiliary = model.score, model.take_auxiliary_loss

    def encoded(encode: Callable[..., Any], *arguments: Any) -> Any:
        clock.switch("encoder")
        return _marked(encode(*arguments), clock, "encoder")

    def scored(*arguments: Any) -> Tensor:
        clock.switch("scoring")
        scores = _marked(score(*arguments), clock, "scoring")
        clock.switch("loss")
        return scores

    own: dict[str, Any] = {
        name: partial(encoded, getattr(model, name))
        for name in ("encode_images", "encode_captions", "image_fragments", "caption_fragments")
        if hasattr(model, name)
    }
    # An auxiliary loss, such as that of captions which VSRN generates, is part of the encoders.
    own |= {"score": scored, "take_auxiliary_loss": lambda: _marked(auxiliary(), clock, "encoder")}
    for name, function in own.items():
        setattr(model, name, function)
    for mining, loss in stepper.losses.items():
        stepper.losses[mining] = _Timed(loss, clock)
    stepper.scenario.target.after_backward.append(lambda: clock.switch("optimizer"))


def _marked(result: Any, clock: StepClock, phase: str) -> Any:
    """Make the gradient of a result, or of each part of it, switch the clock."""
    for part in result if isinstance(result, tuple) else (result,):
        values = part.values if isinstance(part, Fragments) else part
        if values is not None and values.requires_grad:
            values.register_hook(lambda _: clock.switch(phase))
    return result


class _Timed(nn.Module):
    """Make the gradient of a loss switch the clock."""

    def __init__(self, loss: nn.Module, clock: StepClock) -> None:
        super().__init__()
        self.loss, self._clock = loss, clock

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        value: Tensor = _marked(self.loss(*arguments, **options), self._clock, "loss")
        return value
