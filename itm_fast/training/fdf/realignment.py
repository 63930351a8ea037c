"""FDF's realignment training strategy: each feature conversion learns from the negatives of a different batch.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025), Algorithm 1 and Eq 6. Where the paper leaves a choice open:

- B_1 is the batch of the current step and B_n that of n - 1 steps before. A queue holds the base features, or the
  inputs, of the last N - 1 batches, and conversion n always sees lag n - 1. Terms are left out until their batch
  exists. With "trained" and "fresh" the earlier batches are encoded again. With "kept" they are not: if an extractor
  learns quickly, such as a GRU from random weights, old features differ from new ones in ways that have nothing to do
  with their content, and the conversions learn that difference. With "none", which is not in the paper, every
  conversion learns from the negatives of its own batch.
- Pairs of B_n that show the image of a pair of B_1 are not negatives of this pair.
- Gradients of B_1 reach conversion n and the shared extractor, whose backward runs once on the sum of all gradients.
  With "trained", so do those of B_n. With "kept" and "fresh" they reach only conversion n: B_n is converted and scored
  without gradient, and the part that the loss needs is then computed again with gradient. The extractor then has
  gradients from B_1 only, and can lower the loss by moving all of B_1 away from B_n.
- Batch normalization uses the running statistics for B_n in conversions. In an extractor that encodes B_n again it uses
  those of B_n. Neither changes.
- With several processes, each has the whole of B_n and computes the terms between it and its own pairs of B_1.

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
from itm_fast.training.fdf.feature_queue import QueuedBatch, QueuedInputs, read_queue
from itm_fast.training.scenario import BatchFunctions, Scenario, Sets, StepResult

__all__ = ["RealignmentScenario"]


@attrs.frozen(eq=False)
class _Side:
    """The images or the captions of a step, as embeddings that the host scores.

    fused: of the batch. own: of the batch under each conversion, from 0. others: of each queued batch under its
    conversion, from 1.
    """

    fused: Fragments | Tensor
    own: list[Fragments | Tensor]
    others: list[Fragments | Tensor]

    @classmethod
    def of(cls, side: FeatureDiversification, base: Fragments, queued: Sequence[Fragments]) -> _Side:
        """Compute the embeddings of a step from the base features of its batch and of the queued batches."""
        # Unbind once: the backward of each index would allocate a gradient of full size.
        converted = side.conversions(base).unbind()
        others = side.conversions.of_others(queued)
        return cls(
            side.fuse(base, converted),
            [side.embeddings(base, rows) for rows in converted],
            [side.embeddings(other, rows) for other, rows in zip(queued, others, strict=True)],
        )


@attrs.frozen(eq=False)
class _Forward:
    """The results of the model that a step needs.

    images, captions: base features of this process's part of the batch. fused: scores (B, B) of the batch by the fused
    feature. own: the same by each conversion that learns from this batch's negatives. others: the scores of
    `RealignmentScenario._scores` for each queued batch.
    """

    images: Fragments
    captions: Fragments
    fused: Tensor
    own: list[Tensor]
    others: list[tuple[Tensor, Tensor, Tensor]]


class RealignmentScenario(Scenario):
    """Train a model with N conversions by `L = L_realign + online_weight L_online` of the fused feature (Eq 6).

    Args:
        target: the branch that learns; its model is an `FDF`.
        online_weight: the paper's lambda_1.
        batch_size: the maximum number of pairs in a batch.
        image_rows: returns the regions of images by their rows in the training data, as batches contain them, to
            restore a queue. None if batches change them, so that a state contains the regions.
        other_batches: "trained" encodes the other batches with the current extractors and trains these with them,
            "fresh" only encodes them, "kept" keeps their features from their own step, "none" does without them.
    """

    def __init__(
        self,
        target: Branch,
        online_weight: float,
        batch_size: int,
        image_rows: Callable[[Tensor], Tensor | Fragments] | None,
        other_batches: str = "trained",
    ) -> None:
        super().__init__([target], 1.0)
        if not isinstance(target.model, FDF):
            raise TypeError(f"target: expected a model with feature conversions, got {target.model.name}")
        self.model: FDF = target.model
        self.online_weight, self.batch_size, self.image_rows = online_weight, batch_size, image_rows
        self.fresh, self.trained = other_batches in ("fresh", "trained"), other_batches == "trained"
        lags = self.model.config.conversions - 1
        self.queue: deque[QueuedBatch | QueuedInputs] = deque(maxlen=0 if other_batches == "none" else lags)

    @property
    def has_state(self) -> bool:
        return True

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step on the batch, whose base features then enter the queue; messages name the step by `number`.

        Raises:
            ValueError: a loss or the gradient norm is not finite. Nothing is changed in that case.
        """
        given = batch.batch
        with batch.autocast():
            found: _Forward = batch.run(self.model.train(), lambda: self._forward(batch))
        online = batch.loss(found.fused)
        terms = [batch.loss(scores) for scores in found.own]
        terms += [
            batch.realignment_loss(*scores, given.image_index[:, None] == queued.image_index[None, :])
            for scores, queued in zip(found.others, self.queue, strict=True)
        ]
        realignment = torch.stack(terms).sum()
        numbers = self.target.backward(realignment + self.online_weight * online, number)
        numbers |= {"online_loss": float(online.detach()), "realignment_loss": float(realignment.detach())}
        numbers["lr"] = self.target.update()
        if self.queue.maxlen:
            self.queue.appendleft(self._queued(batch, found))
        return StepResult(found.fused.detach(), numbers["online_loss"], numbers)

    def _queued(self, batch: BatchFunctions, found: _Forward) -> QueuedBatch | QueuedInputs:
        """Return what the queue keeps of the whole batch; every process contributes its part."""

        def whole(sets: Sets) -> Sets:
            return batch.whole(self.model, sets)

        more: dict[str, Any] = {"from_data": self.image_rows is not None, "image_index": batch.images, "whole": whole}
        if self.fresh:
            return QueuedInputs.of(batch.batch, **more)
        return QueuedBatch.of(batch.batch, found.images, found.captions, **more)

    def _forward(self, batch: BatchFunctions) -> _Forward:
        model, given = self.model, batch.batch
        with torch.set_grad_enabled(self.trained):
            of_others = [queued.base(model) for queued in self.queue]
        images = model.base_images(given.features)
        captions = model.base_captions(given.token_ids, given.lengths)
        sides = (
            _Side.of(model.images, images, [base for base, _ in of_others]),
            _Side.of(model.captions, captions, [base for _, base in of_others]),
        )
        learning = range(1) if self.queue.maxlen else range(model.config.conversions)
        return _Forward(
            images,
            captions,
            batch.whole_scores(model, *(side.fused for side in sides)),
            [batch.whole_scores(model, *(side.own[n] for side in sides)) for n in learning],
            [self._scores(*sides, n) for n in range(1, len(self.queue) + 1)],
        )

    def _scores(self, images: _Side, captions: _Side, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """All under conversion n, from 0: of this process's pairs of the batch, of their images with the captions of
        another batch, and of that one's images with their captions."""
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
        device, config = next(self.model.parameters()).device, self.model.encoder_config
        widths = (self.model.images.conversions.feature_dim, self.model.captions.conversions.feature_dim)
        kept = read_queue(
            state["scenario"],
            expected=min(steps, self.queue.maxlen or 0),
            batch_size=self.batch_size,
            widths=(config.feature_dim, widths[1]) if self.fresh else widths,
            words=config.vocab_size if self.fresh else None,
            image_rows=self.image_rows,
        )
        self.queue.clear()
        self.queue.extend(queued.to(device) for queued in kept)
