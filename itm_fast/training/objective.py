"""The losses of a run: what their settings may be, and the modules that they make.

Inside: `LOSSES`, `MINING`, `BOOSTING`, `check_loss`, `make_losses`, `make_boosting_loss`, `described_boosting`. The
modules are imported where they are made, so that listing the settings stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from itm_fast import config as settings
from itm_fast.messages import shown

if TYPE_CHECKING:
    from torch import nn

    from itm_fast.training.config import TrainConfig

__all__ = ["BOOSTING", "LOSSES", "MINING", "check_loss", "described_boosting", "make_boosting_loss", "make_losses"]

MINING = ("hardest", "all", "selective", "semi_hard", "contrastive")
# The negatives that each loss takes.
_MINING: Mapping[str, tuple[str, ...]] = {"triplet": MINING, "polynomial": ("hardest",), "cmpm": ("all",)}
LOSSES = tuple(_MINING)
# Losses of a branch beside an anchor: those of Deep Boosting Learning, and those that it is compared with.
_BOOSTED = ("absolute", "relative", "both")
BOOSTING = (*_BOOSTED, "soft_rank", "rkd", "dml", "dino", "dino_inverse")
_ANCHORED = ("oas", "oss", "mss")
# Settings that mean something with some values of another setting alone; of a choice None stands for its default.
_DEPENDENT: Sequence[tuple[str, str, tuple[str | None, ...]]] = (
    ("warmup_epochs", "loss", ("triplet", "polynomial")),
    ("halve_loss", "loss", ("triplet",)),
    ("softmax_scale", "loss", ("cmpm",)),
    ("epsilon", "mining", ("selective",)),
    ("selective_divisor", "mining", ("selective",)),
    ("boosting", "scenario", _ANCHORED),
    ("boosting_weight", "scenario", _ANCHORED),
    *((name, "scenario", _ANCHORED) for name in ("boosting_mining", "boosting_alpha", "soft")),
    *((name, "boosting", (None, *_BOOSTED)) for name in ("boosting_mining", "soft")),
    ("boosting_alpha", "boosting", (None, "absolute", "both")),
    ("anchor", "scenario", ("oas",)),
    ("anchor_start", "scenario", ("oas",)),
    ("branches", "scenario", ("oss",)),
    ("momentum", "scenario", ("mss",)),
)


def check_loss(config: TrainConfig) -> None:
    """Refuses settings that do not go together, so that none is given in vain: ValueError that names the setting."""
    taken = _MINING[config.loss]
    if config.mining not in taken:
        raise ValueError(f"mining: the loss {config.loss} takes {taken[0]}, got {config.mining!r}")
    fields = settings.fields_of(type(config))
    boosted = config.scenario in _ANCHORED and config.boosting in (None, *_BOOSTED)
    # Boosting has the margin, too, whatever the branch's own loss.
    margin = () if boosted else (("margin", "loss", ("triplet", "polynomial")),)
    for name, other, values in (*margin, *_DEPENDENT):
        value, chosen = getattr(config, name), getattr(config, other)
        if chosen not in values and value != fields[name].default:
            wanted = " or ".join(value for value in values if value is not None)
            raise ValueError(f"{name}: {shown(value)} goes with the {other} {wanted}, not {chosen}")


def make_losses(config: TrainConfig) -> dict[str, nn.Module]:
    """The losses by the negatives that a step asks for: those of `config.mining`, and "all" of the warm-up."""
    from itm_fast.losses import CMPMLoss, PolynomialLoss, TripletLoss

    main: nn.Module
    if config.loss == "cmpm":
        main = CMPMLoss(scale=config.softmax_scale)
    elif config.loss == "polynomial":
        main = PolynomialLoss(config.margin)
    else:
        main = TripletLoss(
            config.margin,
            mining=config.mining,
            epsilon=config.epsilon,
            selective_divisor=config.selective_divisor,
            halve=config.halve_loss,
        )
    return {"all": TripletLoss(config.margin, mining="all", halve=config.halve_loss), config.mining: main}


def make_boosting_loss(config: TrainConfig) -> nn.Module:
    """The loss of a branch's scores beside those of an anchor.

    What boosting is compared with has the scales and means over the batch of DBL's public code.
    """
    from itm_fast import losses

    dino = partial(losses.DINOLoss, scale=10.0, anchor_scale=10.0, reduction="mean")
    compared: Mapping[str, Callable[[], nn.Module]] = {
        "soft_rank": partial(losses.SoftRankLoss, reduction="mean"),
        "rkd": partial(losses.RKDLoss, normalize=False, directions="rows", reduction="mean"),
        "dml": partial(losses.DMLLoss, scale=10.0, reduction="mean"),
        "dino": dino,
        "dino_inverse": partial(dino, inverse=True),
    }
    boosting = config.boosting or _BOOSTED[0]
    if boosting in compared:
        return compared[boosting]()
    return losses.BoostingLoss(
        config.margin,
        strategy=boosting,
        mining=config.boosting_mining,
        alpha=config.boosting_alpha,
        soft=config.soft,
    )


def described_boosting(config: TrainConfig) -> str:
    """The loss beside an anchor in words: its name, and its negatives where it chooses some."""
    boosting = config.boosting or _BOOSTED[0]
    return f"{boosting} ({config.boosting_mining})" if boosting in _BOOSTED else boosting
