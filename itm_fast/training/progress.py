"""Where a run stands: what it keeps beside the weights and what the steps depend on.

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
    """What a run came to. `best` is the best validation's summary; `finished` is False where a signal stopped it."""

    best: dict[str, float]
    best_step: int
    steps: int
    seconds: float
    finished: bool


@attrs.define
class Progress:
    """The course of a run so far, as its state keeps it.

    Attributes:
        position: steps that were done when the run started or ended here.
        best, best_step: summary and step of the best validation; an empty one before the first.
        validated_step: the step of the last validation.
        window: losses since the last line of the log.
        log_size: bytes of the log that belong to the run.
        KEYS: the entries of a state that all this comes from.
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
        """That of a state."""
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
        """The entries of a state but for position and size of the log, which are those of the moment."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "validated_step": self.validated_step,
            "window": list(self.window),
            "seconds": self.seconds,
        }

    def start(self) -> None:
        """The time of the run goes on from here."""
        self._started = time.monotonic()

    @property
    def seconds_before(self) -> float:
        """Time that the run had taken before it was resumed here."""
        return self._seconds_before

    @property
    def seconds(self) -> float:
        """Time spent in the run so far, what came before a resume included."""
        return self._seconds_before + time.monotonic() - self._started

    def result(self, total: int) -> TrainResult:
        """What a run of `total` steps has come to."""
        return TrainResult(self.best, self.best_step, self.position, self.seconds, self.position >= total)

    def judge(self, summary: dict[str, float], step: int) -> bool:
        """Notes a validation of the weights after `step`; whether they are the best so far."""
        self.validated_step = step
        better = not self.best or summary["rsum"] > self.best["rsum"]
        if better:
            self.best, self.best_step = summary, step
        return better

    def mean_loss(self) -> float:
        """The mean of the window, which is empty then."""
        mean = sum(self.window) / len(self.window)
        self.window.clear()
        return mean
