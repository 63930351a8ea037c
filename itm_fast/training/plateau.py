"""Detect that a training has collapsed: all scores are nearly equal."""

from __future__ import annotations

import math
import warnings

__all__ = ["PlateauMonitor", "PlateauWarning"]

# Scores count as equal if their standard deviation in a batch is below this, as most models score within [-1, 1], and
# below this share of the largest one of the run, as the scores of some models start close together.
_EQUAL, _SHARE = 0.005, 0.1
# Below this they count as equal also where they never differed.
_ALWAYS = 1e-5
# Steps with equal scores before the warning.
_STEPS = 20
# Relative distance from the plateau that still counts as on it.
_NEAR = 0.03


class PlateauWarning(UserWarning):
    """All scores are nearly equal, and nothing is learned."""


class PlateauMonitor:
    """Warn once when all scores stay nearly equal, or the triplet loss at 2 * B * margin: nothing is learned.

    With hardest negatives, this collapse is a stable state because the gradients of the two directions cancel. Each of
    the 2 B anchors then has exactly the margin as its triplet loss.

    Args:
        margin: margin of the triplet loss.
        patience: consecutive steps with the loss on its plateau before the warning.
        equal_patience: steps since the scores were last seen to differ, before the warning.
    """

    def __init__(self, margin: float, patience: int = 100, equal_patience: int = _STEPS) -> None:
        self.margin, self.patience, self.equal_patience = margin, patience, equal_patience
        self.steps_on_plateau = self.steps_equal = 0
        self.widest = 0.0
        self.warned = False

    def update(self, spread: float | None, advice: str, loss: float | None = None, batch_size: int = 0) -> str | None:
        """Count one step; warn and return the message if the scores have collapsed.

        Args:
            spread: standard deviation of the scores of the batch; None on steps that do not measure it.
            advice: the end of the message: what to do.
            loss: the triplet loss of the hardest negatives, summed over the batch; None with any other loss.
            batch_size: number of pairs.
        """
        plateau = 2 * batch_size * self.margin
        if loss is not None:
            on_plateau = plateau > 0 and abs(loss - plateau) <= _NEAR * plateau
            self.steps_on_plateau = self.steps_on_plateau + 1 if on_plateau else 0
        self.steps_equal += 1
        limit = _EQUAL
        if spread is not None and math.isfinite(spread):
            self.widest = max(self.widest, spread)
            limit = max(min(_EQUAL, _SHARE * self.widest), _ALWAYS)
            self.steps_equal = self.steps_equal if spread < limit else 0
        if self.warned:
            return None
        if spread is not None and spread < limit and self.steps_equal >= self.equal_patience:
            reason = (
                f"their standard deviation in a batch has been below {limit:.2g} for {self.steps_equal} steps (now "
                f"{spread:.2g})"
            )
        elif loss is not None and self.steps_on_plateau >= self.patience:
            reason = f"the loss has stayed at 2 * batch size * margin = {plateau:g} for {self.steps_on_plateau} steps"
        else:
            return None
        self.warned = True
        message = f"all scores are nearly equal: {reason}, and nothing is learned. {advice}"
        warnings.warn(message, PlateauWarning, stacklevel=2)
        return message

    def state_dict(self) -> dict[str, int | bool | float]:
        return {
            "steps_on_plateau": self.steps_on_plateau,
            "steps_equal": self.steps_equal,
            "widest": self.widest,
            "warned": self.warned,
        }

    def load_state_dict(self, state: dict[str, int | bool | float]) -> None:
        """Restore a state. One of an earlier version has no scores."""
        self.steps_on_plateau, self.warned = int(state["steps_on_plateau"]), bool(state["warned"])
        self.steps_equal, self.widest = int(state.get("steps_equal", 0)), float(state.get("widest", 0.0))
