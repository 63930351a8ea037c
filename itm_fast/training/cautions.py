"""Warn of settings that have no effect, of losses for other scores than the model's, and of splits with few images.

Such settings are not refused, because the ablations of a method share its recipe or settings.

Inside: `cautions`, `few_images`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from itm_fast import config as settings
from itm_fast.files.messages import shown
from itm_fast.models import MatchingModel
from itm_fast.models.regulators import steps_of
from itm_fast.training.config import TrainConfig
from itm_fast.training.loss_rules import ADVERSARIAL, ANCHORED

__all__ = ["cautions", "few_images"]

# Any image among so few is within the first ten, the last rank of the recalls.
_FEW_IMAGES = 10

_OF_REGULARIZATION = ("regularization_weight", "model_regularization_weight", "domain_margin")
# What has no effect in each ablation of ADDR.
_IDLE = {
    "base": tuple(name for name in ADVERSARIAL if name != "addr"),
    "united": _OF_REGULARIZATION,
    "multiple": _OF_REGULARIZATION,
}


# The regulators that settings need.
_REGULATORS = {
    "residual_correspondence": ("RCR",), "factors": ("RCR",), "residual_aggregation": ("RAR",),
    "regulator_dropout": ("RAR",), "schedule": ("RCR", "RAR"),
}  # fmt: skip


def cautions(config: TrainConfig, model: MatchingModel) -> Iterator[str]:
    """Yield one line for each such setting of a run that trains `model` with the loss of `config`."""
    if config.scenario == "addr":
        fields = settings.fields_of(TrainConfig)
        for name in _IDLE.get(config.addr or "full", ()):
            value = getattr(config, name)
            if value != fields[name].default:
                yield f"{name}: {shown(value)} has no effect with addr {config.addr}"
    yield from _of_regulators(model)
    if config.soft and config.scenario in ANCHORED and not model.scores_within_one:
        yield (
            f"soft: soft margins take scores to lie within [-1, 1], but those of this {model.name} may lie outside, "
            "where the margins turn negative"
        )
    if config.loss == "matching_bce" and model.scores_within_one:
        yield (
            f"loss: matching_bce takes log-odds, but the scores of this {model.name} lie within [-1, 1]; use siglip, "
            "which learns their scale"
        )
    if config.loss == "bce" and not model.scores_are_probabilities:
        yield (
            f"loss: bce takes probabilities, but the scores of this {model.name} may lie outside (0, 1), where they "
            "have no gradient; use siglip, which learns their scale"
        )


def _of_regulators(model: MatchingModel) -> Iterator[str]:
    own: Any = getattr(model, "encoder_config", None)  # That of the host, if there is one.
    if not hasattr(own, "regulator"):
        return
    correspondence, aggregation = (0, 0) if own.regulator is None else steps_of(own)
    factors = getattr(own, "factors", None)
    fields = settings.fields_of(type(own))
    for name, needed in _REGULATORS.items():
        # A learnable pair of factors serves the attention of RAR, too, and a fixed or learnable one replaces RCR.
        if (
            name not in fields
            or getattr(own, name) == fields[name].default
            or (name, factors) == ("factors", "learnable")
        ):
            continue
        replaced = name != "factors" and factors in ("fixed", "learnable")
        steps = {"RCR": 0 if replaced else correspondence, "RAR": aggregation}
        missing = [regulator for regulator in needed if not steps[regulator]]
        if missing:
            yield f"{name}: {shown(getattr(own, name))} has no effect without {' and '.join(missing)}"


def few_images(sizes: Mapping[str, int]) -> str | None:
    """Return one line if recalls of some splits hardly tell models apart; `sizes`: number of images by split."""
    few = [f"{split} ({count:,})" for split, count in sizes.items() if count <= _FEW_IMAGES]
    if not few:
        return None
    return (
        f"{_FEW_IMAGES} images or fewer in {', '.join(few)}: caption-to-image R@10 is 100 for any model, and the best "
        "model can hardly be told; use more images there (--split of itm-fast data import, --validation-images)"
    )
