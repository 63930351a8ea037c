"""A model that learns, with its optimiser and learning rate.

Inside: `Branch`, `DivergedError`, `finite`, `BERT`, `BACKBONE`, `TEXT_TOWER`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from itm_fast.models.base import MatchingModel
from itm_fast.nn.grouped import stacked_vectors
from itm_fast.training.config import TrainConfig
from itm_fast.training.schedule import learning_rate
from itm_fast.training.state_check import MayLack, check_equal, check_like

__all__ = ["BACKBONE", "BERT", "TEXT_TOWER", "Branch", "DivergedError", "finite", "frozen_epochs"]

# The first part of the names of pretrained weights.
BERT, BACKBONE, TEXT_TOWER = "text_encoder.bert.", "image_encoder.backbone.", "text_encoder.backbone."


def frozen_epochs(config: TrainConfig, name: str) -> int:
    """Return the number of initial epochs in which the weight `name` does not learn."""
    if name.startswith(BACKBONE):
        return config.image_frozen_epochs
    return config.text_frozen_epochs if name.startswith(TEXT_TOWER) else 0


class Branch:
    """Train the weights of `model` with the settings `config`, and the parameters of its loss, `of_loss`.

    All are on their device already.
    """

    def __init__(
        self, config: TrainConfig, model: MatchingModel, per_epoch: int, of_loss: Sequence[nn.Parameter] = ()
    ) -> None:
        self.config, self.model, self._of_loss = config, model, list(of_loss)
        # The steps in which a weight does not learn.
        self._frozen_steps = {
            one: frozen_epochs(config, name) * per_epoch
            for name, one in model.named_parameters()
            if name.startswith((BACKBONE, TEXT_TOWER)) and one.requires_grad
        }
        self.optimizer = _optimizer(config, model, self._of_loss)
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate(config, step, per_epoch) / config.lr)
        # What is to be done once the gradients are whole, before they are clipped.
        self.after_backward: list[Callable[[], None]] = []
        self._freeze()

    def start_later(self, parameters: Iterable[nn.Parameter], steps: int) -> None:
        """Let parameters learn only after `steps` steps. Call it before the first step."""
        self._frozen_steps.update(dict.fromkeys(parameters, steps))
        self._freeze()

    def _freeze(self) -> None:
        """Freeze weights that learn later, or let them learn from the next step on."""
        for parameter, frozen in self._frozen_steps.items():
            parameter.requires_grad_(self.steps >= frozen)

    @property
    def steps(self) -> int:
        """Return the number of steps done."""
        return int(self.scheduler.last_epoch)

    def backward(self, loss: Tensor, number: int) -> dict[str, float]:
        """Compute and clip the gradients of `loss`. Return `loss`, and the norm before clipping as `grad_norm`.

        Raises:
            ValueError: the loss or the norm of step `number` is not finite, the loss depends on no weight, or a weight
                has no part in the loss of the first step.
        """
        value = finite("loss", loss, number)
        if not loss.requires_grad:
            raise ValueError(
                f"loss: that of step {number} depends on no weight; look for detach(), item(), numpy() and no_grad() "
                "in the model and in the loss"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for action in self.after_backward:
            action()
        if self.steps == 0:
            self._check_all_learn()
        learned = [*self.model.parameters(), *self._of_loss]
        norm = torch.nn.utils.clip_grad_norm_(learned, self.config.grad_clip or math.inf)
        return {"loss": value, "grad_norm": finite("norm of the gradient", norm, number)}

    def _check_all_learn(self) -> None:
        """Raise ValueError if a weight has no gradient: it may never learn, and several processes would wait for it."""
        idle = [name for name, one in self.model.named_parameters() if one.requires_grad and one.grad is None]
        if idle:
            raise ValueError(
                f"model: the loss does not depend on the weight {idle[0]} ({len(idle)} such weights in all); exclude "
                "them from training with requires_grad_(False), or remove them"
            )

    def update(self) -> float:
        """Run one step of the optimiser with the present gradients. Return the learning rate."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self._freeze()
        return rate

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except the weights and the loss."""
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def expected_state(self, steps: int) -> dict[str, Any]:
        """What `state_dict` gives after `steps` steps, with other values: for `check_like`, before the first step."""
        expected = self.state_dict()
        # Both kinds of Adam keep the same of each weight, from its first gradient on.
        moments = {"step": torch.zeros(())}
        groups = self.optimizer.param_groups if steps else []
        late, of_loss = self._frozen_steps, set(self._of_loss)
        for index, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
            if steps > late[parameter] if parameter in late else parameter.requires_grad:
                moment = _moment(parameter)
                kept = {**moments, "exp_avg": moment, "exp_avg_sq": moment}
                # Only weights of the model that learn from the first step on have a gradient for sure, in that step.
                sure = parameter not in late and parameter not in of_loss
                expected["optimizer"]["state"][index] = kept if sure else MayLack(kept)
        return expected

    def load_state_dict(self, state: dict[str, Any], steps: int, place: str = "") -> None:
        """Takes what `state_dict` gave after `steps` steps, among other things in `state`, before the first step here.

        Raises:
            ValueError: the state is not that of this configuration after as many steps; the entry is named, behind
                `place`.
        """
        expected = self.expected_state(steps)
        for name, part in expected.items():
            check_like(state[name], part, place + name)
        pairs = zip(state["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True)
        for index, (group, wanted) in enumerate(pairs):
            # The rate is where the schedule was; which kernels step is a matter of the device.
            check_equal(group, wanted, f"{place}optimizer.param_groups.{index}", free=("lr", "fused", "foreach"))
        check_equal(state["scheduler"], {"base_lrs": self.scheduler.base_lrs, "last_epoch": steps}, f"{place}scheduler")
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, kept in state["optimizer"]["state"].items():
            # A weight may have no gradient in some steps, as in a layer that is skipped at random. float32 counts no
            # further than 2**24.
            most, found = min(steps - self._frozen_steps.get(parameters[index], 0), 2**24), float(kept["step"])
            if not (1 <= found <= most and found.is_integer()):
                raise ValueError(f"{place}optimizer.state.{index}.step: expected 1 to {most}, got {found:g}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        # The schedule of another number of epochs has another rate at this step.
        for group, base, factor in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(steps)
        self._freeze()


class DivergedError(ValueError):
    """A loss, or the norm of its gradient, is not finite."""


def finite(what: str, tensor: Tensor, number: int) -> float:
    """Return the number in `tensor`. If it is not finite, raise DivergedError naming `what` and step `number`."""
    value = float(tensor.detach())
    if not math.isfinite(value):
        raise DivergedError(f"the {what} became {value} at step {number}; lower --lr, or look at the features")
    return value


def _moment(parameter: Tensor) -> Tensor:
    """Return a tensor with the layout of Adam's averages of `parameter`: as its own, but without gaps in memory."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return parameter if dense else torch.zeros_like(parameter)


def _optimizer(config: TrainConfig, model: MatchingModel, of_loss: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for name, one in named.items() if not name.startswith((BERT, BACKBONE, TEXT_TOWER))]}
    ]
    factors = {BERT: config.text_lr_factor, BACKBONE: config.image_lr_factor, TEXT_TOWER: config.text_lr_factor}
    for prefix, factor in factors.items():
        own = [one for name, one in named.items() if name.startswith(prefix)]
        groups += [{"params": own, "lr": config.lr * factor}] if own else []
    if not config.decay_biases:
        stacked = set(stacked_vectors(model))
        groups = [part for group in groups for part in _without_decay_of_vectors(group, stacked)]
    if of_loss:
        groups.append({"params": of_loss, "weight_decay": 0.0})
    return kind(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=config.device.split(":")[0] in ("cpu", "cuda"),
    )


def _without_decay_of_vectors(group: dict[str, Any], stacked: Set[nn.Parameter]) -> list[dict[str, Any]]:
    """Divide a group of parameters: biases and the weights of normalisation layers, which are vectors, do not decay.

    Those of feature conversions are `stacked`, one row for each conversion.
    """
    vectors = [one for one in group["params"] if one.ndim <= 1 or one in stacked]
    others = [one for one in group["params"] if one.ndim > 1 and one not in stacked]
    parts = [{**group, "params": others}, {**group, "params": vectors, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]
