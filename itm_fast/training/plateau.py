"""Noticing the plateau on which hardest-negative training gets stuck."""

from __future__ import annotations

import warnings

__all__ = ["PlateauMonitor", "PlateauWarning"]


class PlateauWarning(UserWarning):
    """The loss sits where it sits when all scores are equal."""


class PlateauMonitor:
    """Warns once when the loss stays at 2 * B * margin: then all scores are equal and nothing is learned.

    With hardest negatives each of the 2 B anchors pays exactly the margin when every score is the same. The collapse
    is a stable state: the gradients of the two directions cancel.

    Args:
        margin: margin of the triplet loss, whose sum over the batch is watched.
        patience: consecutive steps on the plateau before the warning.
        tolerance: relative distance from the plateau that still counts.
    """

    def __init__(self, margin: float, patience: int = 100, tolerance: float = 0.01) -> None:
        self.margin, self.patience, self.tolerance = margin, patience, tolerance
        self.steps_on_plateau = 0
        self.warned = False

    def update(self, loss: float, batch_size: int) -> None:
        """Takes the loss of one hardest-negative step on `batch_size` pairs."""
        plateau = 2 * batch_size * self.margin
        on_plateau = plateau > 0 and abs(loss - plateau) <= self.tolerance * plateau
        self.steps_on_plateau = self.steps_on_plateau + 1 if on_plateau else 0
        if self.steps_on_plateau >= self.patience and not self.warned:
            self.warned = True
            warnings.warn(
                f"the loss has stayed at 2 * batch size * margin = {plateau:g} for {self.steps_on_plateau} steps: all "
                "scores are equal and nothing is learned; start with --warmup-epochs 1, take --mining selective, or "
                "lower --lr",
                PlateauWarning,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, int | bool]:
        return {"steps_on_plateau": self.steps_on_plateau, "warned": self.warned}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        self.steps_on_plateau, self.warned = int(state["steps_on_plateau"]), bool(state["warned"])
