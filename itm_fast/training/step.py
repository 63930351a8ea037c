"""One optimiser step: forward, loss, backward, clipping, update.

Inside: `Stepper`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from itm_fast.data import Batch, BatchAugmentation, Vocabulary
from itm_fast.models.base import MatchingModel
from itm_fast.training.config import TrainConfig
from itm_fast.training.diagnostics import image_gradient_norm, mining_diagnostics
from itm_fast.training.objective import make_losses
from itm_fast.training.plateau import PlateauMonitor
from itm_fast.training.schedule import learning_rate
from itm_fast.training.state_check import check_equal, check_like

__all__ = ["Stepper"]


class Stepper:
    """Changes the weights of `model`, batch by batch, as `config` says; the model lies on its device already."""

    def __init__(
        self, config: TrainConfig, model: MatchingModel, vocabulary: Vocabulary, device: torch.device, per_epoch: int
    ) -> None:
        self.config, self.model, self.device = config, model, device
        self.losses = make_losses(config)
        self.optimizer = _optimizer(config, model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate(config, step, per_epoch) / config.lr)
        self.plateau = PlateauMonitor(config.margin)
        self.augmentation = BatchAugmentation(
            vocabulary, words=config.text_augmentation, regions=config.region_augmentation
        )

    def __call__(self, batch: Batch, mining: str, number: int, *, diagnose: bool = False) -> dict[str, float]:
        """Loss with the negatives `mining`, norm of the gradient before clipping, and learning rate of step `number`.

        With `diagnose`, `mining_diagnostics` of the scores and `image_gradient_norm` before clipping as well.

        Raises:
            ValueError: the loss or the norm is not finite; no weight is changed then.
        """
        self.model.train()
        # Its changes come from torch's generator, whose state is saved: a resumed run draws the same ones.
        batch = self.augmentation(batch).to(self.device, non_blocking=True)
        with self.autocast():
            scores = self.model(batch.features, batch.token_ids, batch.lengths)
        positives = None
        if self.config.exclude_same_image:
            positives = batch.image_index[:, None] == batch.image_index[None, :]
        loss = self.losses[mining](scores, positives=positives)
        value = _finite("loss", loss, number)
        self.optimizer.zero_grad(set_to_none=True)
        with image_gradient_norm(self.model, enabled=diagnose) as diagnostics:
            loss.backward()
        if diagnose:
            diagnostics |= mining_diagnostics(scores.detach(), positives, mining, self.config.epsilon)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip or math.inf)
        grad_norm = _finite("norm of the gradient", norm, number)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        if mining == "hardest" and self.config.loss == "triplet":
            self.plateau.update(value * (2 if self.config.halve_loss else 1), len(batch))
        return {"loss": value, "lr": rate, "grad_norm": grad_norm, **diagnostics}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the weights and the batch."""
        return {name: getattr(self, name).state_dict() for name in ("optimizer", "scheduler", "plateau")}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Takes what `state_dict` gave after `steps` steps, among other things in `state`, before the first step here.

        Raises:
            ValueError: the state is not that of this configuration after as many steps; the entry is named.
        """
        expected = self.state_dict()
        # Both kinds of Adam keep the same of each weight, from the first step on.
        moments = {"step": torch.zeros(())}
        groups = self.optimizer.param_groups if steps else []
        for index, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
            expected["optimizer"]["state"][index] = {**moments, "exp_avg": parameter, "exp_avg_sq": parameter}
        for name, part in expected.items():
            check_like(state[name], part, name)
        pairs = zip(state["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True)
        for index, (found, wanted) in enumerate(pairs):
            # The rate is where the schedule was; which kernels step is a matter of the device.
            check_equal(found, wanted, f"optimizer.param_groups.{index}", free=("lr", "fused", "foreach"))
        check_equal(state["scheduler"], {"base_lrs": self.scheduler.base_lrs, "last_epoch": steps}, "scheduler")
        for index, kept in state["optimizer"]["state"].items():
            # float32 counts no further.
            if float(kept["step"]) != min(steps, 2**24):
                raise ValueError(f"optimizer.state.{index}.step: expected {steps}, got {float(kept['step']):g}")
        for name in expected:
            getattr(self, name).load_state_dict(state[name])


def _finite(what: str, tensor: torch.Tensor, number: int) -> float:
    value = float(tensor.detach())
    if not math.isfinite(value):
        raise ValueError(f"the {what} became {value} at step {number}; lower --lr, or look at the features")
    return value


def _optimizer(config: TrainConfig, model: MatchingModel) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    bert = [one for name, one in model.named_parameters() if name.startswith("text_encoder.bert.")]
    others = [one for name, one in model.named_parameters() if not name.startswith("text_encoder.bert.")]
    return kind(
        [{"params": others}, *([{"params": bert, "lr": config.lr * config.bert_lr_factor}] if bert else [])],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=config.device.split(":")[0] in ("cpu", "cuda"),
    )
