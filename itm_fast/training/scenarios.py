"""The scenarios of training: which branches train together, which are anchors to which, and what else learns.

| scenario | branches | anchor |
| --- | --- | --- |
| single | the target | none: ordinary training |
| oas, offline asynchronous | the target | a trained model, frozen |
| oss, online synchronous | several; the last is the target | the branches before each one (dml: all others) |
| mss, momentum synchronous | the target | its moving average |
| addr, adversarial | the target, in turns with discriminators | none |
| aoq, offline quintuplets | the target | none |
| ncr, noisy correspondence | two; the last is the target | none |
| meta_spn, learned weights | the target, with a network of weights | none |
| sam, adaptive margins | the target | none |

Training with realigned feature conversions is another scenario, in `fdf/realignment.py`.

Inside: `make_scenario`, and names of `scenario.py`, `addr/scenario.py`, `dbl/anchor.py`, `dbl/momentum.py` and
`fdf/realignment.py`.

Sources: Diao et al., Deep Boosting Learning: A Brand-new Cooperative Approach for Image-Text Matching, section III-C;
for addr, Ren et al., Beyond the Deep Metric Learning, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.models.bert_folder import load_bert
from itm_fast.training.addr.scenario import AddrScenario, check_model
from itm_fast.training.backbone import set_checkpointing
from itm_fast.training.branch import BACKBONE, BERT, Branch
from itm_fast.training.config import TrainConfig
from itm_fast.training.dbl.anchor import frozen_anchor
from itm_fast.training.dbl.momentum import MomentumScenario, kept_share, momentum_at
from itm_fast.training.fdf.realignment import RealignmentScenario
from itm_fast.training.loss_rules import RIVALS, boosting_weight, is_mutual
from itm_fast.training.own import OwnData
from itm_fast.training.phases import Phases
from itm_fast.training.rivals.aoq import AoqScenario
from itm_fast.training.rivals.meta_spn import MetaSpnScenario
from itm_fast.training.rivals.ncr import NcrScenario
from itm_fast.training.rivals.sam import SamScenario
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult

__all__ = [
    "AddrScenario",
    "BatchFunctions",
    "MomentumScenario",
    "RealignmentScenario",
    "Scenario",
    "StepResult",
    "frozen_anchor",
    "kept_share",
    "make_scenario",
    "momentum_at",
]


def make_scenario(
    config: TrainConfig,
    model: MatchingModel,
    per_epoch: int,
    anchor: MatchingModel | None = None,
    image_rows: Callable[[Tensor], Tensor | Fragments] | None = None,
    n_images: int = 1,
    room: int | None = None,
    of_loss: Sequence[nn.Parameter] = (),
    data: Any = None,
    validation_data: Any = None,
) -> Scenario:
    """Return the scenario that `config` names for the target `model`, which is already on its device.

    Args:
        config: the settings of the run.
        model: the target.
        per_epoch: optimiser steps of the target per epoch.
        anchor: the frozen model of the scenario oas.
        image_rows: returns the regions (n, k, f) of images by their rows in the training data, to resume a realignment.
        n_images: number of images in the training split; each has a discriminator in the scenario addr.
        room: memory in bytes that the discriminators may take; None: no limit.
        of_loss: the parameters of the loss, which are trained with the target.
        data: the training set, for addr, aoq and ncr: the methods of a `Gallery`, and `batch`.
        validation_data: the same for meta_spn.

    Raises:
        ValueError: the scenario oas has no anchor, the model of the scenario addr has no fragments, several branches
            would share a loss with parameters, or there are more realigned conversions than batches in an epoch.
    """
    if config.scenario == "addr":
        check_model(model)
    if of_loss and config.scenario == "oss":
        raise ValueError(f"loss: {config.loss} learns parameters, which several branches (--scenario oss) cannot share")
    target, weight = Branch(config, model, per_epoch, of_loss), boosting_weight(config)
    if config.conversions is not None and config.realignment:
        if config.other_batches != "none" and config.conversions > per_epoch:
            raise ValueError(
                f"conversions: {config.conversions} conversions need as many batches per epoch, but there "
                f"are {per_epoch}; use fewer conversions or a smaller --batch-size"
            )
        # Augmented images cannot be read from the data.
        augmented = config.region_augmentation or config.picture_augmentation != "none"
        augmented = augmented or (isinstance(data, OwnData) and data.makes_batches)
        stored = None if augmented else image_rows
        return RealignmentScenario(target, config.online_weight, config.batch_size, stored, config.other_batches)
    if config.scenario == "oss":
        branches = [*_fresh_branches(config, model, per_epoch, config.branches - 1), target]
        return Scenario(branches, weight, mutual=is_mutual(config))
    if config.scenario in RIVALS:
        return _rival(config, target, per_epoch, data, validation_data)
    if config.scenario == "mss":
        return MomentumScenario(target, weight, config.ema_decay, config.epochs * per_epoch)
    if config.trains_discriminators:
        caption_image = None if data is None else data.caption_image
        return AddrScenario(target, config, Phases.of(config, per_epoch), n_images, room, caption_image)
    if config.scenario == "oas" and anchor is None:
        raise ValueError("anchor: the scenario oas needs a trained model")
    return Scenario([target], weight, anchor if config.scenario == "oas" else None)


def _fresh_branches(config: TrainConfig, model: MatchingModel, per_epoch: int, count: int) -> list[Branch]:
    """Return branches like that of `model`, with other initial weights."""
    device = next(model.parameters()).device
    # Each branch draws its own weights from torch's random state (section III-C: randomly initialised).
    fresh = [type(model)(model.config).to(device) for _ in range(count)]
    # Every branch starts from the same pretrained models.
    for one in fresh:
        if config.bert is not None:
            # The folder may have weights of other parts, too.
            load_bert(one.get_submodule(BERT.rstrip(".")), config.bert, one.beside_bert())
        if config.image_backbone is not None:
            part = BACKBONE.rstrip(".")
            one.get_submodule(part).load_state_dict(model.get_submodule(part).state_dict())
        if config.clip is not None or config.start is not None:
            one.load_state_dict(model.state_dict())
        set_checkpointing(config, one)
    return [Branch(config, one, per_epoch) for one in fresh]


def _rival(config: TrainConfig, target: Branch, per_epoch: int, data: Any, validation_data: Any) -> Scenario:
    """Return the scenario of a method that the papers compare with."""
    if data is None or validation_data is None:
        raise ValueError(f"scenario: {config.scenario} needs the training data and the validation data")
    if config.scenario == "aoq":
        return AoqScenario(target, config, per_epoch, data)
    if config.scenario == "sam":
        return SamScenario(target, config, data)
    if config.scenario == "ncr":
        branches = [*_fresh_branches(config, target.model, per_epoch, 1), target]
        return NcrScenario(branches, config, per_epoch, data)
    return MetaSpnScenario(target, config, per_epoch, validation_data)
