"""The phase and the batch of each step of a run.

Inside: `Phases`, `Pass`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from itm_fast.training.config import TrainConfig

__all__ = ["Pass", "Phases"]

# Passes for discriminators use other orders than the model's passes, which keep the orders of ordinary training.
_DISCRIMINATOR_ORDERS = 2**32


@attrs.frozen
class Pass:
    """A pass over the training captions, or its remaining part.

    Attributes:
        order: the sampler's epoch, which determines the batches.
        start: number of batches to skip.
        repeats: number of steps per batch.
        done: number of steps that the first batch has been used for.
    """

    order: int
    start: int
    repeats: int = 1
    done: int = 0


@attrs.frozen
class Phases:
    """The order of the steps of a run, counted from 0.

    Attributes:
        batches: batches in one pass over the training captions.
        alternation: None: all steps train the model. "epoch": each epoch has a pass for the discriminators and then one
            for the model (ADDR, Algorithm 1). "step": each batch trains the discriminators and then the model.
    """

    batches: int
    alternation: str | None = None

    @classmethod
    def of(cls, config: TrainConfig, batches: int) -> Phases:
        """Create the phases of a run."""
        return cls(batches, config.alternation if config.trains_discriminators else None)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps per epoch. An epoch has one pass that trains the model."""
        return self.batches * (1 if self.alternation is None else 2)

    def discriminator_steps(self, steps: int) -> int:
        """Return how many of the first `steps` steps train discriminators; the others train the model."""
        if self.alternation is None:
            return 0
        if self.alternation == "step":
            return (steps + 1) // 2
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches + min(rest, self.batches)

    def trains_discriminators(self, step: int) -> bool:
        """Return whether step `step` trains discriminators."""
        return self.discriminator_steps(step + 1) > self.discriminator_steps(step)

    def passes(self, step: int) -> Iterator[Pass]:
        """Yield the passes from step `step` on, without end."""
        repeats = 2 if self.alternation == "step" else 1
        taken, done = divmod(step, repeats)
        number, start = divmod(taken, self.batches)
        while True:
            yield Pass(self._order(number), start, repeats, done)
            number, start, done = number + 1, 0, 0

    def _order(self, number: int) -> int:
        if self.alternation != "epoch":
            return number
        epoch, model = divmod(number, 2)
        return epoch if model else epoch + _DISCRIMINATOR_ORDERS
