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
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.models import FDF
from itm_fast.nn import FeatureDiversification
from itm_fast.training.branch import Branch
from itm_fast.training.scenarios.base import BatchFunctions, Scenario, StepResult
from itm_fast.training.scenarios.feature_queue import QueuedBatch, read_queue

__all__ = ["RealignmentScenario"]


@attrs.frozen(eq=False)
class _Side:
    """The images or the captions of a step, as embeddings that the host scores.

    fused: of the batch. own: of the batch under each conversion, from 0. others: of each queued batch under its own
    conversion, from 1.
    """

    fused: Fragments | Tensor
    own: list[Fragments | Tensor]
    others: list[Fragments | Tensor]

    @classmethod
    def of(cls, side: FeatureDiversification, base: Fragments, queued: Sequence[Fragments]) -> _Side:
        """All that a step needs of the base features of its batch and of those before."""
        # Parted once: the backward of each part by itself would make a gradient of the whole.
        converted = side.conversions(base).unbind()
        others = side.conversions.of_others(queued)
        return cls(
            side.fuse(base, converted),
            [side.embeddings(base, rows) for rows in converted],
            [side.embeddings(other, rows) for other, rows in zip(queued, others, strict=True)],
        )


class RealignmentScenario(Scenario):
    """A model with N conversions; `L = L_realign + online_weight L_online` of the fused feature (Eq 6).

    Args:
        target: the branch that learns; its model is an `FDF`.
        online_weight: the paper's lambda_1.
        batch_size: the most pairs of a batch.
        image_rows: the regions of images by their rows in the training data, as a batch has them, for a queue that is
            restored; None where batches have others, so that a state holds them.
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
            sides = (
                _Side.of(model.images, images, [queued.images for queued in self.queue]),
                _Side.of(model.captions, captions, [queued.captions for queued in self.queue]),
            )
            fused = model.score(*(side.fused for side in sides))
            own = model.score(*(side.own[0] for side in sides))
            others = [self._scores(*sides, n) for n in range(1, len(self.queue) + 1)]
        online = batch.loss(fused)
        terms = [batch.loss(own)]
        terms += [
            batch.realignment_loss(*scores, given.image_index[:, None] == queued.image_index[None, :])
            for scores, queued in zip(others, self.queue, strict=True)
        ]
        realignment = torch.stack(terms).sum()
        numbers = self.target.backward(realignment + self.online_weight * online, number)
        numbers |= {"online_loss": float(online.detach()), "realignment_loss": float(realignment.detach())}
        numbers["lr"] = self.target.update()
        self.queue.appendleft(QueuedBatch.of(given, images, captions, from_data=self.image_rows is not None))
        return StepResult(fused.detach(), numbers["online_loss"], numbers)

    def _scores(self, images: _Side, captions: _Side, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """All under conversion n, from 0: of the batch's pairs, of its images with the captions of another batch, and
        of that one's images with its captions."""
        own_images, own_captions = images.own[n], captions.own[n]
        return (
            self.model.pair_scores(own_images, own_captions),
            self.model.score(own_images, captions.others[n - 1]),
            self.model.score(images.others[n - 1], own_captions),
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
