"""Which phase each step of a run belongs to, and which batch it takes.

Inside: `Phases`, `Pass`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from itm_fast.training.config import TrainConfig

__all__ = ["Pass", "Phases"]

# Passes for discriminators have orders of their own, far from those of the model's passes, which are so the ones that
# ordinary training has.
_DISCRIMINATOR_ORDERS = 2**32


@attrs.frozen
class Pass:
    """A pass over the training captions, or what is left of it.

    Attributes:
        order: what the sampler calls epoch: determines the batches.
        start: how many batches are left out.
        repeats: how many steps each batch serves.
        done: how many of them the first batch has served.
    """

    order: int
    start: int
    repeats: int = 1
    done: int = 0


@attrs.frozen
class Phases:
    """The course of a run. Steps count from 0.

    Attributes:
        batches: of one pass over the training captions.
        alternation: None where all steps change the model. "epoch": in each epoch a pass for the discriminators and
            then one for the model (ADDR, Algorithm 1). "step": each batch serves the discriminators and then the model.
    """

    batches: int
    alternation: str | None = None

    @classmethod
    def of(cls, config: TrainConfig, batches: int) -> Phases:
        """Those of a run."""
        return cls(batches, config.alternation if config.trains_discriminators else None)

    @property
    def steps_per_epoch(self) -> int:
        """An epoch has one pass that changes the model."""
        return self.batches * (1 if self.alternation is None else 2)

    def discriminator_steps(self, steps: int) -> int:
        """How many of the first `steps` steps change discriminators; the others change the model."""
        if self.alternation is None:
            return 0
        if self.alternation == "step":
            return (steps + 1) // 2
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches + min(rest, self.batches)

    def trains_discriminators(self, step: int) -> bool:
        """Whether step `step` changes discriminators."""
        return self.discriminator_steps(step + 1) > self.discriminator_steps(step)

    def passes(self, step: int) -> Iterator[Pass]:
        """The passes from step `step` on, without end."""
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
