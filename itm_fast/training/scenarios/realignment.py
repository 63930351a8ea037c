"""FDF's realignment training strategy: each feature conversion learns from the negatives of a batch of its own.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025), Algorithm 1 and Eq 6. Readings of what the paper leaves open:

- B_1 is the batch of the step and B_n the one of n - 1 steps before, so that a queue holds the base features of the
  last N - 1 batches; conversion n always meets lag n - 1. Terms whose batch is not there yet are left out.
- Pairs of B_n with the image of a pair of B_1 are no negatives of it.
- The side of B_1 reaches conversion n and the shared extractor, whose backward runs once on the sum of all gradients;
  the side of B_n reaches conversion n alone. B_n is converted and scored without gradient, and what the loss then needs
  of it again with gradient; batch normalisation takes the running statistics for it, which it does not change.

Inside: `RealignmentScenario`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.data import Batch
from itm_fast.fragments import Fragments
from itm_fast.models import FDF
from itm_fast.training.branch import Branch
from itm_fast.training.scenarios.base import BatchFunctions, Scenario, StepResult
from itm_fast.training.scenarios.feature_queue import QueuedBatch, read_queue

__all__ = ["RealignmentScenario"]


@attrs.frozen(eq=False)
class _Batch:
    """Base features of the batch of a step, and what all conversions make of them."""

    images: Fragments
    captions: Fragments
    converted_images: Tensor
    converted_captions: Tensor


@attrs.frozen(eq=False)
class _Scores:
    """Of the batch's pairs, of its images with another batch's captions, and of that one's images with its captions."""

    pairs: Tensor
    captions: Tensor
    images: Tensor
    same_image: Tensor


class RealignmentScenario(Scenario):
    """A model with N conversions; `L = L_realign + online_weight L_online` of the fused feature (Eq 6).

    Args:
        target: the branch that learns; its model is an `FDF`.
        online_weight: the paper's lambda_1.
        batch_size: the most pairs of a batch.
        image_rows: regions (n, k, f) of images by their rows in the training data, for a queue that is restored.
    """

    def __init__(
        self,
        target: Branch,
        online_weight: float,
        batch_size: int,
        image_rows: Callable[[Tensor], Tensor | Fragments] | None,
    ) -> None:
        super().__init__([target], 1.0)
        if not isinstance(target.model, FDF):
            raise TypeError(f"target: expected a model with feature conversions, got {target.model.name}")
        self.model: FDF = target.model
        self.online_weight, self.batch_size, self.image_rows = online_weight, batch_size, image_rows
        self.queue: deque[QueuedBatch] = deque(maxlen=self.model.config.conversions - 1)

    @property
    def has_state(self) -> bool:
        return True

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """One step on the batch, whose base features then join the queue; `number` is what messages call it.

        Raises:
            ValueError: a loss or the norm of the gradient is not finite; nothing is changed then.
        """
        model = self.model
        model.train()
        given = batch.batch
        with batch.autocast():
            images = model.base_images(given.features)
            captions = model.base_captions(given.token_ids, given.lengths)
            present = _Batch(images, captions, model.images.conversions(images), model.captions.conversions(captions))
            fused = model.score(
                model.images.fuse(images, present.converted_images),
                model.captions.fuse(captions, present.converted_captions),
            )
            own = model.score(*self._embeddings(present, 0))
            others = [self._scores(present, given, queued, n) for n, queued in enumerate(self.queue, start=1)]
        online = batch.loss(fused)
        terms = [batch.loss(own)]
        terms += [batch.realignment_loss(one.pairs, one.captions, one.images, one.same_image) for one in others]
        realignment = torch.stack(terms).sum()
        numbers = self.target.backward(realignment + self.online_weight * online, number)
        numbers |= {"online_loss": float(online.detach()), "realignment_loss": float(realignment.detach())}
        numbers["lr"] = self.target.update()
        self.queue.appendleft(QueuedBatch.of(given, images, captions))
        return StepResult(fused.detach(), numbers["online_loss"], numbers)

    def _embeddings(self, present: _Batch, n: int) -> tuple[Fragments | Tensor, Fragments | Tensor]:
        """Images and captions of the batch under conversion n, from 0."""
        return (
            self.model.images.embeddings(present.images, present.converted_images[n]),
            self.model.captions.embeddings(present.captions, present.converted_captions[n]),
        )

    def _scores(self, present: _Batch, given: Batch, queued: QueuedBatch, n: int) -> _Scores:
        """All under conversion n, from 0."""
        images, captions = self._embeddings(present, n)
        sides = ((self.model.images, queued.images), (self.model.captions, queued.captions))
        other_images, other_captions = (
            side.embeddings(base, side.conversions.of_others(base, n)) for side, base in sides
        )
        return _Scores(
            self.model.pair_scores(images, captions),
            self.model.score(images, other_captions),
            self.model.score(other_images, captions),
            given.image_index[:, None] == queued.image_index[None, :],
        )

    def _scenario_part(self, others: list[dict[str, Any]]) -> dict[str, Any]:
        return {"scenario": {"queue": [queued.state() for queued in self.queue]}}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        self.target.load_state_dict(state, steps)
        device = next(self.model.parameters()).device
        kept = read_queue(
            state["scenario"],
            expected=min(steps, self.model.config.conversions - 1),
            batch_size=self.batch_size,
            widths=(self.model.images.conversions.feature_dim, self.model.captions.conversions.feature_dim),
            image_rows=self.image_rows,
        )
        self.queue.clear()
        self.queue.extend(queued.to(device) for queued in kept)
