"""The scenario of NCR: two networks that tell each other which pairs match.

Source: Huang et al., "Learning with Noisy Correspondence for Cross-modal Matching" (NeurIPS 2021). Differences from its
official code: a batch is a batch of all captions, whose clean and noisy pairs form a group each, with the negatives of
the own group; the code has separate batches of both. One step of the optimiser follows the sum of both groups' losses.

Inside: `NcrScenario`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.data import BatchLoader, EpochSampler
from itm_fast.losses.rectified_loss import pair_losses, predicted_labels, rectified_losses, soft_margins
from itm_fast.models.base import MatchingModel
from itm_fast.training.branch import Branch
from itm_fast.training.config import TrainConfig
from itm_fast.training.rivals.mixture import low_share
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult

__all__ = ["NcrScenario"]

# If no pair seems noisy, this share counts as noisy, as in the official code.
_LEAST_NOISY = 100
# Mixed with the seed, so that the batches of the split differ from those of the training.
_STREAM = 0x9C


class NcrScenario(Scenario):
    """Train two networks: each learns from the pairs that the other takes for clean, and from rectified labels.

    - Warm-up: each network minimises the mean hinges of all negatives.
    - At the start of each further epoch, each network computes the loss of every pair. A mixture of two distributions
      gives the probability w that a pair is clean; a pair is clean if w of the other network is above `ncr_threshold`.
    - A clean pair has the label `w + (1 - w) P`, P the label that the network itself predicts; a noisy one has the mean
      of both networks' predictions, and counts from the second half of the epochs on.
    - The label sets the margin of a pair, whose hardest negatives are those of its group.

    The last branch is the target. Evaluate it together with `branches/1`, as an ensemble.

    Args:
        branches: two.
        config: the settings of the run.
        per_epoch: steps per epoch.
        data: the training set.
    """

    def __init__(self, branches: Sequence[Branch], config: TrainConfig, per_epoch: int, data: Any) -> None:
        super().__init__(branches, 0.0)
        self.config, self.per_epoch, self.data = config, per_epoch, data
        self._split = -1
        # Of each branch; a branch uses the row of the other one.
        self._clean = torch.ones(2, len(data))

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step of both networks; messages name it by `number`.

        Raises:
            ValueError: a loss or the norm of a gradient is not finite; no weight is changed then.
        """
        epoch, warmup = self.target.steps // self.per_epoch, self.config.warmup_epochs or 0
        positives = batch.images[:, None] == batch.images if self.config.exclude_same_image else None
        labels: list[Tensor] = []
        if epoch >= warmup:
            if self._split != epoch:
                self._divide(batch, epoch)
            labels = [self._labels(batch, branch.model, positives) for branch in self.branches]
        with_noisy = 2 * (epoch - warmup) >= self.config.epochs - warmup
        results = []
        for index, branch in enumerate(self.branches):
            scores = batch.scores(branch.model.train())
            if labels:
                clean = self._clean[1 - index][batch.batch.caption_index.cpu()].to(scores.device)
                both = torch.stack(labels).mean(dim=0)
                losses = self._losses(scores, clean, labels[index], both, with_noisy, positives)
            else:
                losses = pair_losses(scores, self.config.margin, positives=positives)
            loss = losses.mean() if self.config.mean_loss else losses.sum()
            numbers = branch.backward(loss, number)
            if labels:
                numbers["clean_share"] = float((clean > self.config.ncr_threshold).float().mean())
            results.append(StepResult(scores.detach(), float(loss.detach()), numbers))
        for branch, result in zip(self.branches, results, strict=True):
            result.numbers["lr"] = branch.update()
        return results[-1]

    def _losses(
        self, scores: Tensor, clean: Tensor, own: Tensor, both: Tensor, with_noisy: bool, positives: Tensor | None
    ) -> Tensor:
        """Return the loss (B,) of each pair; `own` and `both` are predicted labels."""
        is_clean = clean > self.config.ncr_threshold
        labels = torch.where(is_clean, clean + (1 - clean) * own, both)
        margins = soft_margins(labels, self.config.margin, self.config.ncr_margin)
        # A pair of the other group is no negative.
        excluded = is_clean[:, None] != is_clean
        excluded = excluded if positives is None else excluded | positives
        losses = rectified_losses(scores, margins, positives=excluded)
        return losses if with_noisy else losses * is_clean

    @torch.no_grad()
    def _labels(self, batch: BatchFunctions, model: MatchingModel, positives: Tensor | None) -> Tensor:
        scores = batch.scores(model.eval())
        return predicted_labels(scores, self.config.margin, positives=positives)

    @torch.no_grad()
    def _divide(self, batch: BatchFunctions, epoch: int) -> None:
        """Compute the loss of every pair by both networks, and the probability that it is clean."""
        device = next(self.target.model.parameters()).device
        seed = int(np.random.SeedSequence([self.config.seed, _STREAM]).generate_state(1)[0])
        sampler = EpochSampler(len(self.data), self.config.batch_size, seed=seed, epoch=epoch)
        losses = torch.zeros(2, len(self.data))
        # A loader draws a seed for its workers.
        with torch.random.fork_rng(devices=[]):
            for read in BatchLoader(self.data, sampler, workers=self.config.workers):
                part = read.to(device)
                positives = None
                if self.config.exclude_same_image:
                    positives = part.image_index[:, None] == part.image_index
                for index, branch in enumerate(self.branches):
                    with batch.autocast():
                        scores = branch.model.eval()(part.features, part.token_ids, part.lengths)
                    found = pair_losses(scores, self.config.margin, positives=positives)
                    losses[index, part.caption_index.cpu()] = found.float().cpu()
        self._clean = torch.stack([self._probabilities(own) for own in losses])
        self._split = epoch

    def _probabilities(self, losses: Tensor) -> Tensor:
        """Return the probability (n,) that a pair is clean; some pairs are always below the threshold."""
        clean = low_share(losses, self.config.ncr_mixture)
        threshold = self.config.ncr_threshold
        if len(clean) and float(clean.min()) > threshold:
            least = clean.argsort()[: len(clean) // _LEAST_NOISY + 1]
            clean[least] = torch.clamp(clean[least], max=threshold)
        return clean

    @property
    def has_state(self) -> bool:
        return True

    def _scenario_part(self, others: list[dict[str, Any]]) -> dict[str, Any]:
        own = super()._scenario_part(others).get("scenario", {})
        return {"scenario": {**own, "split": self._split, "clean": self._clean}}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Like `Scenario.load_state_dict`."""
        super().load_state_dict(state, steps)
        kept = state["scenario"]
        if not -1 <= kept["split"] <= steps // self.per_epoch:
            raise ValueError(f"scenario.split: expected -1 to {steps // self.per_epoch}, got {kept['split']}")
        if not bool(((kept["clean"] >= 0) & (kept["clean"] <= 1)).all()):
            raise ValueError("scenario.clean: expected probabilities from 0 to 1")
        self._split, self._clean = kept["split"], kept["clean"].clone()
