"""Detect that hardest-negative training has collapsed: all scores are nearly equal."""

from __future__ import annotations

import warnings

__all__ = ["PlateauMonitor", "PlateauWarning"]

# Scores count as equal if the hardest negative is nearer to the positive than this share of the margin.
_EQUAL = 0.02
# Steps on the plateau before equal scores count as a collapse: scores of an untrained model are close, too.
_STEPS = 20


class PlateauWarning(UserWarning):
    """All scores are nearly equal, and nothing is learned."""


class PlateauMonitor:
    """Warn once when the loss stays at 2 * B * margin: all scores are equal and nothing is learned.

    With hardest negatives, each of the 2 B anchors has exactly the margin as its loss if all scores are equal. This
    collapse is a stable state because the gradients of the two directions cancel.

    Args:
        margin: margin of the triplet loss. The watched loss is its sum over the batch.
        patience: consecutive steps on the plateau before the warning; 20 suffice if the scores are seen to be equal.
        tolerance: relative distance from the plateau that still counts.
    """

    def __init__(self, margin: float, patience: int = 100, tolerance: float = 0.03) -> None:
        self.margin, self.patience, self.tolerance = margin, patience, tolerance
        self.steps_on_plateau = 0
        self.warned = False

    def update(self, loss: float, batch_size: int, gap: float | None = None) -> str | None:
        """Take the loss of one hardest-negative step; warn and return the message if the scores have collapsed.

        Args:
            loss: the sum over the batch.
            batch_size: number of pairs.
            gap: mean distance of the hardest negative from the positive, on steps that are logged.
        """
        plateau = 2 * batch_size * self.margin
        on_plateau = plateau > 0 and abs(loss - plateau) <= self.tolerance * plateau
        self.steps_on_plateau = self.steps_on_plateau + 1 if on_plateau else 0
        equal = gap is not None and gap < _EQUAL * self.margin and self.steps_on_plateau >= min(_STEPS, self.patience)
        if self.warned or not (equal or self.steps_on_plateau >= self.patience):
            return None
        self.warned = True
        message = (
            f"all scores are nearly equal: the loss has stayed at 2 * batch size * margin = {plateau:g} for "
            f"{self.steps_on_plateau} steps, and nothing is learned. Start with --warmup-epochs 1, use --mining "
            "selective, or lower --lr"
        )
        warnings.warn(message, PlateauWarning, stacklevel=2)
        return message

    def state_dict(self) -> dict[str, int | bool]:
        return {"steps_on_plateau": self.steps_on_plateau, "warned": self.warned}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        self.steps_on_plateau, self.warned = int(state["steps_on_plateau"]), bool(state["warned"])
