"""The progress of a run: position, best validation, losses, time.

Inside: `Progress`, `TrainResult`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

__all__ = ["Progress", "TrainResult"]


@attrs.frozen
class TrainResult:
    """The result of a run.

    Attributes:
        best: the summary of the best validation, such as `best["rsum"]`; empty before the first.
        best_step: the step of that validation.
        steps: steps done.
        seconds: duration of the run in seconds, including the time before a resume.
        finished: False if SIGINT (Ctrl-C) or SIGTERM stopped the run.
    """

    best: dict[str, float]
    best_step: int
    steps: int
    seconds: float
    finished: bool


@attrs.define
class Progress:
    """The progress of a run, as saved in its state.

    Attributes:
        position: number of steps done when the run started or ended.
        best, best_step: summary and step of the best validation, the last of equal ones; an empty summary before the
            first.
        validated_step: the step of the last validation.
        window: losses since the last line of the log.
        log_size: bytes of the log that belong to the run.
        KEYS: the entries of a state that hold these values.
    """

    KEYS: ClassVar = ("position", "best", "best_step", "validated_step", "window", "seconds", "log_size")

    position: int = 0
    best: dict[str, float] = attrs.field(factory=dict)
    best_step: int = 0
    validated_step: int = 0
    window: list[float] = attrs.field(factory=list)
    log_size: int = 0
    _seconds_before: float = 0.0
    _started: float = attrs.field(factory=time.monotonic)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """Create the progress from a state."""
        return cls(
            position=state["position"],
            best=state["best"],
            best_step=state["best_step"],
            validated_step=state["validated_step"],
            window=list(state["window"]),
            log_size=state["log_size"],
            seconds_before=state["seconds"],
        )

    def state(self) -> dict[str, Any]:
        """Return the entries of a state, except the position and the size of the log."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "validated_step": self.validated_step,
            "window": list(self.window),
            "seconds": self.seconds,
        }

    def start(self) -> None:
        """Start the clock of the run."""
        self._started = time.monotonic()

    @property
    def seconds_before(self) -> float:
        """Return the seconds of the run before it was resumed."""
        return self._seconds_before

    @property
    def seconds(self) -> float:
        """Return the seconds of the run so far, including the time before a resume."""
        return self._seconds_before + time.monotonic() - self._started

    def result(self, total: int) -> TrainResult:
        """Return the result of a run of `total` steps."""
        return TrainResult(self.best, self.best_step, self.position, self.seconds, self.position >= total)

    def judge(self, summary: dict[str, float], step: int) -> bool:
        """Record a validation after `step`, and return whether it is the best so far; of equal ones, the last is."""
        self.validated_step = step
        # All validations may be equal, as on a split that is too easy. The first model is then hardly trained.
        better = not self.best or summary["rsum"] >= self.best["rsum"]
        if better:
            self.best, self.best_step = summary, step
        return better

    def mean_loss(self) -> float:
        """Return the mean of the window, and clear it."""
        mean = sum(self.window) / len(self.window)
        self.window.clear()
        return mean
