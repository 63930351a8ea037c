"""Rules for combining settings of losses and scenarios.

The functions take a `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from itm_fast import config as settings
from itm_fast.files.messages import shown
from itm_fast.losses import registry

__all__ = [
    "ADVERSARIAL",
    "ANCHORED",
    "BOOSTED",
    "BOOSTING",
    "BOOSTING_FORMS",
    "MINING",
    "RIVALS",
    "boosting_of",
    "boosting_weight",
    "check_auxiliary",
    "check_copies",
    "check_loss",
    "described_boosting",
    "escapes",
    "is_mutual",
    "loss_settings",
    "mining_of",
    "present_defaults",
    "warms_up_itself",
    "warmup_of",
    "without_idle",
]

MINING = ("hardest", "all", "selective", "semi_hard", "sct")
# Settings that a loss takes only if its constructor has a parameter for them, and the name of that parameter.
_OF_LOSS = {"margin": "margin", "warmup_epochs": "margin", "halve_loss": "halve", "softmax_scale": "scale"}
# Losses of a branch beside an anchor: those of Deep Boosting Learning, and those that it is compared with.
BOOSTED = ("absolute", "relative", "both")
BOOSTING = (*BOOSTED, "soft_rank", "rkd", "dml", "dino", "dino_inverse")
BOOSTING_FORMS = ("paper", "code")
# The scenarios with an anchor, and the settings of the scenario addr.
ANCHORED = ("oas", "oss", "mss")
ADVERSARIAL = (
    "addr", "adversarial_weight", "regularization_weight", "model_regularization_weight", "domain_margin",
    "risk_aggregation", "alternation", "discriminator_captions", "discriminator_lr", "discriminator_precision",
    "discriminators_on_disk",
)  # fmt: skip
# The scenarios of methods that the papers compare with, and their settings.
RIVALS = ("aoq", "ncr", "meta_spn", "sam")
# Of these, the ones that do not use the loss by name after the warm-up.
_WITHOUT_OPTIONS = ("aoq", "ncr", "meta_spn")
_OF_RIVALS = {
    "aoq": ("offline_candidates", "offline_margin", "offline_alpha", "offline_beta", "offline_every"),
    "ncr": ("ncr_threshold", "ncr_mixture", "ncr_margin"),
    "meta_spn": ("meta_lr", "meta_hidden"),
    "sam": ("sam_weight", "sam_divisor", "sam_samples"),
}
# Settings that have an effect only with some values of another setting.
_DEPENDENT: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("epsilon", "mining", ("selective",)),
    ("selective_divisor", "mining", ("selective",)),
    ("boosting", "scenario", ANCHORED),
    ("boosting_weight", "scenario", ANCHORED),
    *((name, "scenario", ANCHORED) for name in ("boosting_margin", "boosting_mining", "boosting_alpha", "soft")),
    *((name, "boosting", BOOSTED) for name in ("boosting_margin", "boosting_mining", "soft")),
    ("boosting_alpha", "boosting", ("absolute", "both")),
    ("boosting_form", "scenario", ANCHORED),
    ("boosting_form", "boosting", ("soft_rank", "rkd", "dml", "dino_inverse")),
    ("anchor", "scenario", ("oas",)),
    ("anchor_start", "scenario", ("oas",)),
    ("branches", "scenario", ("oss",)),
    ("ema_decay", "scenario", ("mss",)),
    *((name, "scenario", ("addr",)) for name in ADVERSARIAL),
    *((name, "scenario", (scenario,)) for scenario, names in _OF_RIVALS.items() for name in names),
)
# The same, for dropping settings of a recipe; a run with them is refused.
_OF_REALIGNMENT = tuple((name, "realignment", (True,)) for name in ("other_batches", "online_weight"))
_OF_CONVERSIONS = (
    "conversion_layer", "conversion_residual", "reweighting", "normalize_fused", "realignment", "other_batches",
    "online_weight",
)  # fmt: skip


def check_loss(config: Any) -> None:
    """Raise ValueError naming the first setting that has no effect with the others."""
    loss = registry.find(config.loss)
    mining = mining_of(config)
    if loss.mining is not None and mining not in loss.mining:
        raise ValueError(f"mining: the loss {config.loss} takes {loss.mining[0]}, got {mining!r}")
    if config.loss_options:
        registry.create(config.loss, loss_settings(config), config.loss_options)
    fields = settings.fields_of(type(config))
    boosting = boosting_of(config)
    resolved = {"boosting": boosting, "mining": mining}
    # Boosting uses --margin, too, unless --boosting-margin is given.
    boosted = config.scenario in ANCHORED and boosting in BOOSTED and config.boosting_margin is None
    of_loss = [name for name in _OF_LOSS if not (boosted and name == "margin")]
    for name, other, values in (*map(_with_losses, of_loss), *_DEPENDENT):
        value, chosen = getattr(config, name), resolved.get(other, getattr(config, other))
        is_default = value == fields[name].default or (name == "warmup_epochs" and value == 0)
        if chosen not in values and not is_default:
            raise ValueError(f"{name}: {shown(value)} goes with the {other} {' or '.join(values)}, not {chosen}")
    _check_conversions(config, fields)
    _check_twins(config)
    _check_start(config)
    if config.loss_options and config.scenario in _WITHOUT_OPTIONS:
        raise ValueError(f"loss_options: expected none with the {config.scenario}, which has losses of its own")
    if config.loss_options and config.realignment and (config.conversions or 0) > 1:
        raise ValueError(
            "loss_options: expected none with the realignment of several conversions, which has losses of its own"
        )
    if config.scenario in RIVALS:
        found = (
            ("loss", config.loss, "triplet"), ("mining", mining, "hardest"), ("halve_loss", config.halve_loss, False),
        )  # fmt: skip
        for name, value, wanted in found:
            if value != wanted:
                raise ValueError(f"{name}: the scenario {config.scenario} takes {shown(wanted)}, got {shown(value)}")


def check_auxiliary(config: Any, name: str, processes: int) -> None:
    """Raise ValueError if a run cannot add a model's own loss, which its setting `name` turns on."""
    allowed = ("single", *ANCHORED, "sam")
    if config.scenario not in allowed:
        raise ValueError(f"{name}: goes with the scenario {', '.join(allowed)}, not {config.scenario}; expected 0")
    if processes > 1:
        raise ValueError(f"{name}: goes with a single process, got {processes}; expected 0")


def check_copies(config: Any, processes: int) -> None:
    """Raise ValueError if a run cannot repeat the pairs of a batch, as a loss over copies needs."""
    for name, found, wanted in (("scenario", config.scenario, "single"), ("conversions", config.conversions, None)):
        if found != wanted:
            raise ValueError(f"{name}: the loss {config.loss} takes {wanted or 'none'}, got {found}")
    if processes > 1:
        raise ValueError(f"loss: {config.loss} trains in one process, got {processes}")


def warmup_of(config: Any) -> int:
    """Return the number of epochs with all negatives. If the settings name none, it follows from the others.

    With the hardest negatives from the first step on, a fresh model often gives all pairs the same score and stays
    there. The code of VSE-infinity starts with an epoch of all negatives, too.
    """
    if config.warmup_epochs is not None:
        return int(config.warmup_epochs)
    is_trained = config.start is not None and config.conversions is None
    is_fresh = not is_trained and (config.scenario != "oas" or not config.anchor_start)
    warms_up = config.loss == "triplet" or warms_up_itself(config.loss)
    return int(warms_up and mining_of(config) == "hardest" and config.epochs > 1 and is_fresh)


def escapes(config: Any, mining: str) -> str:
    """Return what to change if all scores become equal in steps with the negatives `mining`."""
    found = []
    if mining != "all" and _takes(config.loss, "warmup_epochs"):
        found.append(f"start with --warmup-epochs {(config.warmup_epochs or 0) + 1}")
    if mining == "hardest" and config.loss == "triplet":
        found.append("use --mining selective")
    text = f"{', '.join(found)}{',' * (len(found) > 1)} or lower --lr" if found else "lower --lr"
    return text[0].upper() + text[1:]


def without_idle(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, except those that have no effect with the `given` ones.

    For example, `--mining hardest` drops a recipe's settings of selectively hard negatives, unless they are given, too.
    """
    together, asked, idle = {**recipe, **given}, dict(given), set()
    loss = str(given.get("loss"))
    if "loss" in given and loss in registry.names():
        found = registry.find(loss)
        if found.mining is not None and together.get("mining") not in found.mining:
            idle.add("mining")
            asked.setdefault("mining", found.mining[0])
        with_margin = together.get("scenario") in ANCHORED
        idle |= {name for name in _OF_LOSS if not _takes(loss, name) and not (with_margin and name == "margin")}
    if given.get("conversions") == 1:
        idle.add("other_batches")
    rules = (*_DEPENDENT, *_OF_REALIGNMENT)
    idle |= {name for name, other, values in rules if other in asked and asked[other] not in values}
    return {name: value for name, value in recipe.items() if name not in idle - given.keys()}


def present_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present defaults of settings that have no effect and are at the default of an earlier version.

    The file of a run holds all settings, also those without effect: a run of an earlier version goes on with these.

    Args:
        values: all settings of a run by name.
    """
    has_risks = values["scenario"] == "addr" and values["addr"] != "base"
    has_network = values["conversions"] is not None and values["conversion_layer"] == "ffn"
    has_others = values["realignment"] and (values["conversions"] or 0) > 1
    changed = (
        ("risk_aggregation", has_risks, "sum", "mean"),
        ("conversion_residual", has_network, False, True),
        ("other_batches", has_others, "kept", "trained"),
    )
    return {name: now for name, has_effect, before, now in changed if not has_effect and values[name] == before}


def loss_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the run that a loss can have parameters for, by the names of these parameters."""
    return {
        "margin": config.margin,
        "mining": mining_of(config),
        "epsilon": config.epsilon,
        "selective_divisor": config.selective_divisor,
        "halve": config.halve_loss,
        "scale": config.softmax_scale,
        "reduction": "mean" if config.mean_loss else "sum",
    }


def warms_up_itself(loss: str) -> bool:
    """Return whether a loss takes hardest or all negatives, and no others: it then warms up with its own form."""
    return set(registry.find(loss).mining or ()) == {"hardest", "all"}


def _takes(loss: str, name: str) -> bool:
    if name == "warmup_epochs" and warms_up_itself(loss):
        return True
    return _OF_LOSS[name] in registry.find(loss).parameters


def _with_losses(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the rule that a setting needs one of the losses with a parameter for it."""
    return name, "loss", tuple(loss for loss in registry.names() if _takes(loss, name))


def _check_conversions(config: Any, fields: Mapping[str, Any]) -> None:
    if config.conversions is None:
        for name in _OF_CONVERSIONS:
            if getattr(config, name) != fields[name].default:
                raise ValueError(f"{name}: {shown(getattr(config, name))} needs conversions, but there are none")
        return
    if not config.realignment:
        for name in ("other_batches", "online_weight"):
            if getattr(config, name) != fields[name].default:
                raise ValueError(f"{name}: needs realignment; without it there is only the online loss")
        return
    if config.conversions == 1 and config.other_batches != fields["other_batches"].default:
        raise ValueError("other_batches: needs several conversions; a single one sees no other batch")
    for name, wanted in (("loss", "triplet"), ("scenario", "single"), ("micro_batch", None)):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"{name}: the realignment of conversions takes {wanted or 'none'}, got {getattr(config, name)!r}; "
                "--no-realignment trains the fused feature alone"
            )


def _check_twins(config: Any) -> None:
    """Raise ValueError if networks with equal losses would start from the same weights, and so stay equal."""
    started = [name for name in ("clip", "start") if getattr(config, name) is not None]
    if not started or config.scenario not in ("oss", "ncr"):
        return
    boosting = boosting_of(config)
    # At equal scores the other losses of a branch have no gradient.
    apart = (*BOOSTED, {"paper": "dino_inverse", "code": "soft_rank"}[config.boosting_form])
    if config.scenario == "ncr" or boosting not in apart:
        what = "scenario ncr" if config.scenario == "ncr" else f"boosting {boosting}"
        raise ValueError(f"{started[0]}: expected none with the {what}: all networks would start from the same weights")
    # While each hinge is active, all branches after the first have the same gradient.
    if config.branches > 2 and boosting in BOOSTED and config.boosting_mining == "all":
        raise ValueError(
            f"boosting_mining: expected hardest with {started[0]} and {config.branches} branches: from the same "
            "weights, branches with all negatives stay equal"
        )


def _check_start(config: Any) -> None:
    """Raise ValueError if the model would start from other weights, too."""
    if config.start is None:
        return
    for name in ("bert", "clip", "image_backbone", "image_class_token"):
        if getattr(config, name):
            raise ValueError(f"{name}: expected none with --start, whose model has its own")
    if config.scenario == "oss" and config.conversions is not None:
        raise ValueError("start: expected none with the scenario oss and conversions, which start from random weights")
    if config.scenario == "oas" and config.anchor_start:
        raise ValueError("start: expected none where the model starts from its anchor; --no-anchor-start allows it")


def boosting_weight(config: Any) -> float:
    """Return the factor of the boosting loss, which is halved if the branch's own loss is.

    In section III-C of the paper, both losses are sums over both directions. The losses that boosting is compared with
    have their own scales.
    """
    halved = config.halve_loss and boosting_of(config) in BOOSTED
    return config.boosting_weight * (0.5 if halved else 1.0)


def described_boosting(config: Any) -> str:
    """Describe the boosting loss: its name, and the setting of its form."""
    boosting = boosting_of(config)
    return f"{boosting} ({config.boosting_mining if boosting in BOOSTED else config.boosting_form})"


def mining_of(config: Any) -> str:
    """Return the negatives of the loss. If the settings name none, they are the first ones that the loss takes."""
    return config.mining or (registry.find(config.loss).mining or MINING)[0]


def boosting_of(config: Any) -> str:
    """Return the name of the boosting loss."""
    return config.boosting or BOOSTED[0]


def is_mutual(config: Any) -> bool:
    """Return whether each branch learns from all others, as in the paper on Deep Mutual Learning."""
    return boosting_of(config) == "dml" and config.boosting_form == "paper"
