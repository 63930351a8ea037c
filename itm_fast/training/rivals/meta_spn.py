"""The scenario of Meta-SPN: a network that learns the weights of pairs from validation data.

Source: Wei et al., "Meta Self-Paced Learning for Cross-Modal Matching" (ACM MM 2021). Its code is not public. From the
paper come: a fully connected network maps the score of a pair and its relation to the score beside it to a weight, and
learns from the validation set by a step of the model ahead. The choice of pairs and the form of the loss are those of
the same authors' "Universal Weighting Metric Learning for Cross-Modal Matching" (CVPR 2020), which weighs the positive
and the hardest negative of an anchor. The width, the rate and the optimiser of the network are ours.

Inside: `MetaSpnScenario`, `WeightNetwork`, `pair_terms`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.data import EpochSampler
from itm_fast.models.base import MatchingModel
from itm_fast.ops.triplet_loss import upcast
from itm_fast.training.branch import Branch
from itm_fast.training.config import TrainConfig
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult
from itm_fast.training.state_check import check_like

__all__ = ["MetaSpnScenario", "WeightNetwork", "pair_terms"]

# Mixed with the seed, so that its weights and batches differ from those of the model.
_STREAM = 0x5B
# Length of the step of the difference quotient, relative to the norm of the weights.
_STEP = 1e-3


class WeightNetwork(nn.Module):
    """Map scores of pairs to weights from 0 to 1: two layers with a ReLU, and a sigmoid, for positives and negatives.

    Args:
        hidden: width of the hidden layers.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.positive, self.negative = (
            nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(2)
        )

    def forward(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the weights (2, n) of positives and negatives from their scores (n,)."""
        gap = positive - negative
        inputs = (self.positive, positive, gap), (self.negative, negative, -gap)
        return torch.stack([part(torch.stack([score, other], dim=1))[:, 0] for part, score, other in inputs]).sigmoid()


def pair_terms(scores: Tensor, margin: float, positives: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positives (2 B,) and the hardest negatives (2 B,) of all anchors, and which are informative.

    Rows come first. A pair is informative where the negative, plus the margin, scores above the positive. Elsewhere
    the negative is 0.
    """
    own = upcast(scores).diagonal()
    (rows, _), (columns, _) = F_itm.hardest_negatives(scores, positives)
    positive, negative = torch.cat([own, own]), torch.cat([rows, columns])
    informative = negative + margin > positive
    return positive, negative.masked_fill(~informative, 0.0), informative


class MetaSpnScenario(Scenario):
    """Minimise `sum v_n s_n - v_p s_p` over informative anchors; the weights v are those of a `WeightNetwork`.

    A step:

    1. The gradient of that loss, with fixed v, gives the weights of the model one plain step ahead.
    2. There, the triplet loss of a batch of validation data has the gradient g.
    3. The network's gradient is that of the validation loss after the step ahead. It is `-lr` times the sum over the
       terms of the derivative of the term along g, times the gradient of its weight v. The derivative along g is a
       central difference quotient of two forward passes.
    4. With the network's new weights, the model takes a step of its optimiser.

    Args:
        target: the branch that learns.
        config: the settings of the run.
        per_epoch: steps per epoch.
        data: the validation data.
    """

    def __init__(self, target: Branch, config: TrainConfig, per_epoch: int, data: Any) -> None:
        super().__init__([target], 0.0)
        self.config, self.per_epoch, self.data = config, per_epoch, data
        device = next(target.model.parameters()).device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.SeedSequence([config.seed, _STREAM]).generate_state(1)[0]))
            self.network = WeightNetwork(config.meta_hidden).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.meta_lr)

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step of the network and of the model; messages name it by `number`.

        Raises:
            ValueError: a loss or the norm of a gradient is not finite; no weight of the model is changed then.
        """
        if self.target.steps // self.per_epoch < (self.config.warmup_epochs or 0):
            return super().step(batch, number)
        positives = batch.images[:, None] == batch.images if self.config.exclude_same_image else None
        meta = self._learn_weights(batch, positives)
        scores = batch.scores(self.target.model.train())
        loss, weights = self._loss(scores, positives)
        numbers = self.target.backward(loss, number)
        numbers |= {"meta_loss": meta, **weights, "lr": self.target.update()}
        return StepResult(scores.detach(), float(loss.detach()), numbers)

    def _loss(self, scores: Tensor, positives: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        positive, negative, informative = pair_terms(scores, self.config.margin, positives)
        with torch.no_grad():
            weights = self.network(positive, negative) * informative
        loss = (weights[1] * negative - weights[0] * positive).sum()
        count = float(informative.sum().clamp(min=1))
        named = zip(("positive_weight", "negative_weight"), weights, strict=True)
        return loss / (len(scores) if self.config.mean_loss else 1), {
            name: float(one.sum()) / count for name, one in named
        }

    def _learn_weights(self, batch: BatchFunctions, positives: Tensor | None) -> float:
        """Run one step of the network; return the loss of the validation batch."""
        model = self.target.model
        learned = [one for one in model.parameters() if one.requires_grad]
        with _unchanged(model, learned):
            scores = _scored(batch, model)
            loss, _ = self._loss(scores, positives)
            ahead = torch.autograd.grad(loss, learned)
            start = [one.detach().clone() for one in learned]
            rate = self.target.optimizer.param_groups[0]["lr"]
            _move(learned, start, ahead, -rate)
            own = self._validation(batch)
            # Forked, so that `_scored` draws below what it drew above.
            with batch.autocast(), torch.random.fork_rng(devices=_devices(model)):
                others = model(own.features, own.token_ids, own.lengths, self.config.micro_batch)
            same = own.image_index[:, None] == own.image_index if self.config.exclude_same_image else None
            meta = F_itm.triplet_loss(others, margin=self.config.margin, positives=same) / max(len(own), 1)
            direction = torch.autograd.grad(meta, learned)
            length = _norm(direction)
            step = _STEP * _norm(start) / length if length else 0.0
            sides = []
            for sign in (1.0, -1.0):
                _move(learned, start, direction, sign * step)
                with torch.no_grad():
                    sides.append(upcast(_scored(batch, model)))
        if step:
            self._update(scores.detach(), sides, positives, rate / (2 * step))
        return float(meta.detach())

    def _update(self, scores: Tensor, sides: list[Tensor], positives: Tensor | None, factor: float) -> None:
        positive, negative, informative = pair_terms(scores, self.config.margin, positives)
        weights = self.network(positive, negative)
        (_, captions), (_, images) = F_itm.hardest_negatives(scores, positives)
        numbers = torch.arange(len(scores), device=scores.device)
        change = sides[0] - sides[1]
        own = change.diagonal()
        # An anchor without a negative has the index -1, and is not informative.
        hard = torch.cat([change[numbers, captions], change[images, numbers]])
        along = torch.stack([-torch.cat([own, own]), hard]) * informative
        self.optimizer.zero_grad(set_to_none=True)
        (-factor * (along * weights).sum()).backward()
        self.optimizer.step()

    def _validation(self, batch: BatchFunctions) -> Any:
        """Return the batch of validation data of the next step."""
        size = min(self.config.batch_size, len(self.data))
        epoch, place = divmod(self.target.steps, max(len(self.data) // size, 1))
        seed = int(np.random.SeedSequence([self.config.seed, _STREAM, 1]).generate_state(1)[0])
        sampler = EpochSampler(len(self.data), size, seed=seed, epoch=epoch, drop_last=True, start_batch=place)
        return self.data.batch(next(iter(sampler))).to(batch.images.device)

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Like `Scenario.state_dict`, with the network and its optimiser."""
        own = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**self.target.state_dict(), "scenario": own}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Like `Scenario.load_state_dict`."""
        self.target.load_state_dict(state, steps)
        kept = state["scenario"]
        expected = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        if isinstance(kept, dict) and isinstance(kept.get("optimizer"), dict) and kept["optimizer"].get("state"):
            moments = {"step": torch.zeros(())}
            expected["optimizer"]["state"] = {
                index: {**moments, "exp_avg": one, "exp_avg_sq": one}
                for index, one in enumerate(self.network.parameters())
            }
        check_like(kept, expected, "scenario")
        self.network.load_state_dict(kept["network"])
        self.optimizer.load_state_dict(kept["optimizer"])


@contextlib.contextmanager
def _unchanged(model: MatchingModel, learned: list[nn.Parameter]) -> Iterator[None]:
    """Restore buffers, random numbers and the weights `learned` after the block."""
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    weights = [(one, one.detach().clone()) for one in learned]
    with torch.random.fork_rng(devices=_devices(model)):
        yield
    with torch.no_grad():
        for one, before in (*buffers, *weights):
            one.data.copy_(before)


def _scored(batch: BatchFunctions, model: MatchingModel) -> Tensor:
    """Return the scores of the batch. Dropout draws the same in each call."""
    with torch.random.fork_rng(devices=_devices(model)):
        return batch.scores(model.train())


def _devices(model: MatchingModel) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _move(learned: list[nn.Parameter], start: list[Tensor], direction: tuple[Tensor, ...], length: float) -> None:
    with torch.no_grad():
        for one, before, along in zip(learned, start, direction, strict=True):
            one.data.copy_(before + length * along)


def _norm(parts: Any) -> float:
    return float(torch.stack([one.detach().double().square().sum() for one in parts]).sum().sqrt())
