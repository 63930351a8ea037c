"""Detect gradients that are too large to be right."""

from __future__ import annotations

import warnings

__all__ = ["GradientMonitor", "GradientWarning"]

# Healthy gradients of the losses here are at most some hundred times the loss.
_ABSURD = 1e5


class GradientWarning(UserWarning):
    """The gradient norm is absurdly large."""


class GradientMonitor:
    """Warn once when the gradient norm of a step is more than 1e5 times the loss."""

    def __init__(self) -> None:
        self.warned = False

    def update(self, norm: float, loss: float) -> str | None:
        """Take the gradient norm before clipping and the loss of one step; warn and return the message if absurd."""
        if self.warned or norm <= _ABSURD * max(abs(loss), 1.0):
            return None
        self.warned = True
        message = (
            f"the gradient norm is {norm:.1e} at a loss of {loss:.3g}, too large to be right. Check the features with "
            "`itm-fast data check`, or lower --lr"
        )
        warnings.warn(message, GradientWarning, stacklevel=2)
        return message

    def state_dict(self) -> dict[str, bool]:
        return {"warned": self.warned}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.warned = bool(state["warned"])
