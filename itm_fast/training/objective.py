"""The loss modules of a run, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from itm_fast import losses
from itm_fast.losses import registry
from itm_fast.losses.contrastive_loss import LARGEST_SCALE
from itm_fast.models.base import MatchingModel
from itm_fast.training.config import TrainConfig
from itm_fast.training.loss_rules import boosting_of, loss_settings, mining_of, warms_up_itself

__all__ = ["make_boosting_loss", "make_losses", "make_realignment_losses"]


def make_losses(config: TrainConfig, model: MatchingModel) -> dict[str, nn.Module]:
    """Return the losses by the negatives of a step: `config.mining`, and "all" for the warm-up.

    Learned scales start where those of a pretrained `model` ended. A loss that warms up with its own form has the same
    parameters in both.
    """
    run = loss_settings(config)
    options = {**_pretrained_start(config.loss, model), **config.loss_options}
    main = registry.create(config.loss, run, options)
    if warms_up_itself(config.loss):
        warm_up = registry.create(config.loss, {**run, "mining": "all"}, options)
        _share_parameters(warm_up, main)
    else:
        warm_up = registry.create("triplet", {**run, "mining": "all"}, options if config.loss == "triplet" else {})
    return {"all": warm_up, mining_of(config): main}


def _share_parameters(loss: nn.Module, main: nn.Module) -> None:
    """Let the parts of `loss` use the parameters of the parts of `main` with the same names."""
    parts = dict(main.named_modules())
    for name, part in loss.named_modules():
        shared = parts[name]._parameters if name in parts else {}
        part._parameters.update({own: shared[own] for own in part._parameters if own in shared})


def _pretrained_start(loss: str, model: MatchingModel) -> dict[str, Any]:
    """Return the options of a loss with a learned scale that follow from the pretraining of the model."""
    scale, bias = model.pretrained_scale
    if loss == "infonce" and scale is not None:
        return {"initial_scale": min(scale, LARGEST_SCALE)}
    # The scale of a softmax says nothing about the scale of single pairs.
    if loss == "siglip" and scale is not None and bias is not None:
        return {"initial_scale": scale, "initial_bias": bias}
    return {}


def make_realignment_losses(config: TrainConfig) -> dict[str, nn.Module]:
    """Return the losses with negatives of another batch, by the negatives of a step, as `make_losses`."""
    realignment = partial(
        losses.RealignmentLoss, config.margin, halve=config.halve_loss, reduction="mean" if config.mean_loss else "sum"
    )
    mining = mining_of(config)
    main = realignment(mining=mining, epsilon=config.epsilon, selective_divisor=config.selective_divisor)
    return {"all": realignment(mining="all"), mining: main}


def make_boosting_loss(config: TrainConfig) -> nn.Module:
    """Return the boosting loss of a branch with an anchor.

    The losses that boosting is compared with have the scales and batch means of DBL's official code, which the paper
    does not state. Where that code differs from the paper, `config.boosting_form` selects the form.
    """
    code = config.boosting_form == "code"
    dino = partial(losses.DINOLoss, scale=10.0, anchor_scale=10.0, reduction="mean")
    rank: dict[str, Any] = {"transfer": "dbl", "length": 4} if code else {}
    compared: Mapping[str, Callable[[], nn.Module]] = {
        "soft_rank": partial(losses.SoftRankLoss, reduction="mean", **rank),
        "rkd": partial(
            losses.RKDLoss, normalize=False, weight=10.0 if code else 1.0, directions="rows", reduction="mean"
        ),
        "dml": partial(losses.DMLLoss, scale=10.0, reduction="mean"),
        "dino": dino,
        "dino_inverse": partial(dino, inverse=True, divergence=code),
    }
    boosting = boosting_of(config)
    if boosting in compared:
        return compared[boosting]()
    return losses.BoostingLoss(
        config.margin if config.boosting_margin is None else config.boosting_margin,
        strategy=boosting,
        mining=config.boosting_mining,
        alpha=config.boosting_alpha,
        soft=config.soft,
        reduction="mean" if config.mean_loss else "sum",
    )
