"""The scenario of AOQ: offline hard negatives of the whole training set beside those of the batch.

Source: Chen et al., "Adaptive Offline Quintuplet Loss for Image-Text Matching" (ECCV 2020). The paper takes the
candidates from a trained VSRN once, and trains from fresh weights. Here the current model finds them at the start of an
epoch, after the epochs of warm-up, which are ordinary training.

Inside: `AoqScenario`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.losses.quintuplet_loss import QuintupletLoss
from itm_fast.training.branch import Branch
from itm_fast.training.config import TrainConfig
from itm_fast.training.rivals.offline import offline_negatives, paired_scores, selected
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult
from itm_fast.training.state_check import check_like

__all__ = ["AoqScenario"]

# Mixed with the seed, so that the draws differ from the order of the batches.
_STREAM = 0xA0


class AoqScenario(Scenario):
    """Train a model with quintuplets: image, caption, an offline hard negative of each, and their own partners.

    Args:
        target: the branch that learns.
        config: the settings of the run.
        per_epoch: steps per epoch.
        data: the training set.
    """

    def __init__(self, target: Branch, config: TrainConfig, per_epoch: int, data: Any) -> None:
        super().__init__([target], 0.0)
        self.config, self.per_epoch, self.data = config, per_epoch, data
        self.loss = QuintupletLoss(
            config.margin,
            offline_margin=config.offline_margin,
            alpha=config.offline_alpha,
            beta=config.offline_beta,
            reduction="mean" if config.mean_loss else "sum",
        )
        self._mined = -1
        self._negatives = torch.full((config.offline_every, 2, len(data)), -1, dtype=torch.int32)

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step; messages name it by `number`.

        Raises:
            ValueError: the loss or the norm of a gradient is not finite; no weight is changed then.
        """
        epoch = self.target.steps // self.per_epoch
        if epoch < (self.config.warmup_epochs or 0):
            return super().step(batch, number)
        if self._mined < 0 or epoch - self._mined >= self.config.offline_every:
            self._mine(batch, epoch)
        scores, offline = self._scores(batch, self._negatives[epoch - self._mined])
        positives = batch.images[:, None] == batch.images if self.config.exclude_same_image else None
        loss = self.loss(scores, offline, positives=positives)
        numbers = self.target.backward(loss, number)
        numbers["offline_gap"] = float((offline[:2] - scores.diagonal()).detach().mean())
        numbers["lr"] = self.target.update()
        return StepResult(scores.detach(), float(loss.detach()), numbers)

    def _mine(self, batch: BatchFunctions, epoch: int) -> None:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.config.seed, epoch, _STREAM])))
        with torch.random.fork_rng(devices=[]), batch.autocast():
            self._negatives = offline_negatives(
                self.target.model, self.data, self.config.offline_candidates, self.config.offline_every, random
            )
        self._mined = epoch

    def _scores(self, batch: BatchFunctions, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (B, B) of the batch and those of the offline pairs (4, B)."""
        model, own = self.target.model.train(), batch.batch
        captions = own.caption_index.cpu()
        # Where there is none, the pair itself: its hinge with an offline margin of 0 has no gradient.
        chosen = negatives[:, captions].to(torch.int64)
        chosen = torch.where(chosen < 0, captions, chosen)
        other = batch.read(chosen.flatten())
        count, size = len(captions), self.config.micro_batch
        with batch.autocast():
            images, texts = model.encode(own.features, own.token_ids, own.lengths, size)
            partners, hard = model.encode(other.features, other.token_ids, other.lengths, size)
            scores = model.score(images, texts)
            model.observe(images, texts, scores.detach())
            first, second = torch.arange(count), torch.arange(count, 2 * count)
            hard_texts, hard_images = selected(hard, first), selected(partners, second)
            offline = [
                paired_scores(model, images, hard_texts),
                paired_scores(model, hard_images, texts),
                paired_scores(model, hard_images, hard_texts),
                paired_scores(model, selected(partners, first), selected(hard, second)),
            ]
        return scores, torch.stack(offline)

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Like `Scenario.state_dict`, with the offline negatives and the epoch in which they were found."""
        return {**self.target.state_dict(), "scenario": {"mined": self._mined, "negatives": self._negatives}}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Like `Scenario.load_state_dict`."""
        self.target.load_state_dict(state, steps)
        kept = state["scenario"]
        check_like(kept, {"mined": self._mined, "negatives": self._negatives}, "scenario")
        if not -1 <= kept["mined"] <= steps // self.per_epoch:
            raise ValueError(f"scenario.mined: expected -1 to {steps // self.per_epoch}, got {kept['mined']}")
        least, most = kept["negatives"].min(), kept["negatives"].max()
        if not -1 <= int(least) <= int(most) < len(self.data):
            raise ValueError(f"scenario.negatives: expected captions from -1 to {len(self.data) - 1}, got {int(most)}")
        self._mined, self._negatives = kept["mined"], kept["negatives"].clone()
