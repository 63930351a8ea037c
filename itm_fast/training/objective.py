"""The losses of a run: what their settings may be, and the modules that they make.

Inside: `LOSSES`, `MINING`, `BOOSTING`, `BOOSTING_FORMS`, `ANCHORED`, `ADVERSARIAL`, `check_loss`, `make_losses`,
`make_realignment_losses`, `make_boosting_loss`, `described_boosting`, `is_mutual`. The modules are imported where they
are made, so that listing the settings stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from itm_fast import config as settings
from itm_fast.messages import shown

if TYPE_CHECKING:
    from torch import nn

    from itm_fast.training.config import TrainConfig

__all__ = [
    "ADVERSARIAL",
    "ANCHORED",
    "BOOSTING",
    "BOOSTING_FORMS",
    "LOSSES",
    "MINING",
    "boosting_weight",
    "check_loss",
    "described_boosting",
    "is_mutual",
    "make_boosting_loss",
    "make_losses",
    "make_realignment_losses",
    "without_idle",
]

MINING = ("hardest", "all", "selective", "semi_hard", "sct")
# The negatives that each loss takes.
_MINING: Mapping[str, tuple[str, ...]] = {"triplet": MINING, "polynomial": ("hardest",), "cmpm": ("all",)}
LOSSES = tuple(_MINING)
_WITH_MARGIN = ("triplet", "polynomial")
# Losses of a branch beside an anchor: those of Deep Boosting Learning, and those that it is compared with.
_BOOSTED = ("absolute", "relative", "both")
BOOSTING = (*_BOOSTED, "soft_rank", "rkd", "dml", "dino", "dino_inverse")
BOOSTING_FORMS = ("paper", "code")
# The scenarios with an anchor, and the settings of the scenario addr.
ANCHORED = ("oas", "oss", "mss")
ADVERSARIAL = (
    "addr", "adversarial_weight", "regularization_weight", "model_regularization_weight", "domain_margin",
    "risk_aggregation", "alternation", "discriminator_lr", "discriminator_precision", "discriminators_on_disk",
)  # fmt: skip
# Settings that mean something with some values of another setting alone.
_DEPENDENT: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("warmup_epochs", "loss", _WITH_MARGIN),
    ("halve_loss", "loss", ("triplet",)),
    ("softmax_scale", "loss", ("cmpm",)),
    ("epsilon", "mining", ("selective",)),
    ("selective_divisor", "mining", ("selective",)),
    ("boosting", "scenario", ANCHORED),
    ("boosting_weight", "scenario", ANCHORED),
    *((name, "scenario", ANCHORED) for name in ("boosting_margin", "boosting_mining", "boosting_alpha", "soft")),
    *((name, "boosting", _BOOSTED) for name in ("boosting_margin", "boosting_mining", "soft")),
    ("boosting_alpha", "boosting", ("absolute", "both")),
    ("boosting_form", "scenario", ANCHORED),
    ("boosting_form", "boosting", ("soft_rank", "rkd", "dml", "dino_inverse")),
    ("anchor", "scenario", ("oas",)),
    ("anchor_start", "scenario", ("oas",)),
    ("branches", "scenario", ("oss",)),
    ("ema_decay", "scenario", ("mss",)),
    *((name, "scenario", ("addr",)) for name in ADVERSARIAL),
)
# As these, but only where a setting of a recipe gives way: a run is refused otherwise.
_OF_REALIGNMENT = tuple((name, "realignment", (True,)) for name in ("other_batches", "online_weight"))
_OF_CONVERSIONS = (
    "conversion_layer", "conversion_residual", "reweighting", "normalize_fused", "realignment", "other_batches",
    "online_weight",
)  # fmt: skip


def check_loss(config: TrainConfig) -> None:
    """Refuses settings that do not go together, so that none is given in vain: ValueError that names the setting."""
    taken = _MINING[config.loss]
    if config.mining not in taken:
        raise ValueError(f"mining: the loss {config.loss} takes {taken[0]}, got {config.mining!r}")
    fields = settings.fields_of(type(config))
    boosting = boosting_of(config)
    # Boosting has the margin, too, whatever the branch's own loss, unless it has one of its own.
    boosted = config.scenario in ANCHORED and boosting in _BOOSTED and config.boosting_margin is None
    margin = () if boosted else (("margin", "loss", _WITH_MARGIN),)
    for name, other, values in (*margin, *_DEPENDENT):
        value, chosen = getattr(config, name), boosting if other == "boosting" else getattr(config, other)
        if chosen not in values and value != fields[name].default:
            raise ValueError(f"{name}: {shown(value)} goes with the {other} {' or '.join(values)}, not {chosen}")
    _check_conversions(config, fields)


def without_idle(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe but for those that mean nothing with what was `given` beside it.

    `--mining hardest` leaves out what a recipe says of selectively hard negatives, unless that is given, too.
    """
    together, asked, idle = {**recipe, **given}, dict(given), set()
    loss = str(given.get("loss"))
    if loss in _MINING and together.get("mining") not in _MINING[loss]:
        idle.add("mining")
        asked.setdefault("mining", _MINING[loss][0])
    if loss in LOSSES and loss not in _WITH_MARGIN and together.get("scenario") not in ANCHORED:
        idle.add("margin")
    if given.get("conversions") == 1:
        idle.add("other_batches")
    rules = (*_DEPENDENT, *_OF_REALIGNMENT)
    idle |= {name for name, other, values in rules if other in asked and asked[other] not in values}
    return {name: value for name, value in recipe.items() if name not in idle - given.keys()}


def _check_conversions(config: TrainConfig, fields: Mapping[str, Any]) -> None:
    if config.conversions is None:
        for name in _OF_CONVERSIONS:
            if getattr(config, name) != fields[name].default:
                raise ValueError(
                    f"{name}: {shown(getattr(config, name))} goes with conversions, of which there are none"
                )
        return
    if not config.realignment:
        for name in ("other_batches", "online_weight"):
            if getattr(config, name) != fields[name].default:
                raise ValueError(f"{name}: goes with realignment; without it the online loss stands alone")
        return
    if config.conversions == 1 and config.other_batches != fields["other_batches"].default:
        raise ValueError("other_batches: goes with several conversions; one meets no other batch")
    for name, wanted in (("loss", "triplet"), ("scenario", "single"), ("micro_batch", None)):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"{name}: the realignment of conversions takes {wanted or 'none'}, got {getattr(config, name)!r}; "
                "--no-realignment trains the fused feature alone"
            )


def make_losses(config: TrainConfig) -> dict[str, nn.Module]:
    """The losses by the negatives that a step asks for: those of `config.mining`, and "all" of the warm-up."""
    from itm_fast.losses import CMPMLoss, PolynomialLoss, TripletLoss

    reduction = "mean" if config.mean_loss else "sum"
    triplet = partial(TripletLoss, config.margin, halve=config.halve_loss, reduction=reduction)
    main: nn.Module
    if config.loss == "cmpm":
        main = CMPMLoss(scale=config.softmax_scale, reduction=reduction)
    elif config.loss == "polynomial":
        main = PolynomialLoss(config.margin, reduction=reduction)
    else:
        main = triplet(mining=config.mining, epsilon=config.epsilon, selective_divisor=config.selective_divisor)
    return {"all": triplet(mining="all"), config.mining: main}


def make_realignment_losses(config: TrainConfig) -> dict[str, nn.Module]:
    """The losses with the negatives of another batch, by the negatives that a step asks for, as `make_losses`."""
    from itm_fast.losses import RealignmentLoss

    realignment = partial(
        RealignmentLoss, config.margin, halve=config.halve_loss, reduction="mean" if config.mean_loss else "sum"
    )
    main = realignment(mining=config.mining, epsilon=config.epsilon, selective_divisor=config.selective_divisor)
    return {"all": realignment(mining="all"), config.mining: main}


def make_boosting_loss(config: TrainConfig) -> nn.Module:
    """The loss of a branch's scores beside those of an anchor.

    What boosting is compared with has the scales and means over the batch of DBL's public code, of which the paper says
    nothing; where that code parts from what the paper says, `config.boosting_form` chooses.
    """
    from itm_fast import losses

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


def boosting_weight(config: TrainConfig) -> float:
    """What a boosting loss is multiplied with, beside a branch's own loss that is halved or not.

    Section III-C of the paper adds both as they are: both sum over both directions. The losses that boosting is
    compared with have scales of their own.
    """
    halved = config.halve_loss and boosting_of(config) in _BOOSTED
    return config.boosting_weight * (0.5 if halved else 1.0)


def described_boosting(config: TrainConfig) -> str:
    """The loss beside an anchor in words: its name, and what chooses its form."""
    boosting = boosting_of(config)
    return f"{boosting} ({config.boosting_mining if boosting in _BOOSTED else config.boosting_form})"


def boosting_of(config: TrainConfig) -> str:
    """The name of the loss beside an anchor."""
    return config.boosting or _BOOSTED[0]


def is_mutual(config: TrainConfig) -> bool:
    """Whether branches that train together learn each from all others: Deep Mutual Learning, as its paper has it."""
    return boosting_of(config) == "dml" and config.boosting_form == "paper"
