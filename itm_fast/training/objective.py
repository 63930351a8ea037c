"""The loss of a run: what its settings may be, and the modules that they make.

Inside: `LOSSES`, `MINING`, `check_loss`, `make_losses`. The modules are imported where they are made, so that listing
the settings stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from itm_fast import config as settings
from itm_fast.messages import shown

if TYPE_CHECKING:
    from torch import nn

    from itm_fast.training.config import TrainConfig

__all__ = ["LOSSES", "MINING", "check_loss", "make_losses"]

MINING = ("hardest", "all", "selective", "semi_hard", "contrastive")
# The negatives that each loss takes.
_MINING: Mapping[str, tuple[str, ...]] = {"triplet": MINING, "polynomial": ("hardest",), "cmpm": ("all",)}
LOSSES = tuple(_MINING)
# Settings that mean something with some values of another setting alone.
_DEPENDENT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "margin": ("loss", ("triplet", "polynomial")),
    "warmup_epochs": ("loss", ("triplet", "polynomial")),
    "halve_loss": ("loss", ("triplet",)),
    "softmax_scale": ("loss", ("cmpm",)),
    "epsilon": ("mining", ("selective",)),
    "selective_divisor": ("mining", ("selective",)),
}


def check_loss(config: TrainConfig) -> None:
    """Refuses settings that do not go together, so that none is given in vain: ValueError that names the setting."""
    taken = _MINING[config.loss]
    if config.mining not in taken:
        raise ValueError(f"mining: the loss {config.loss} takes {taken[0]}, got {config.mining!r}")
    fields = settings.fields_of(type(config))
    for name, (other, values) in _DEPENDENT.items():
        value, chosen = getattr(config, name), getattr(config, other)
        if chosen not in values and value != fields[name].default:
            raise ValueError(f"{name}: {shown(value)} goes with the {other} {' or '.join(values)}, not {chosen}")


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
