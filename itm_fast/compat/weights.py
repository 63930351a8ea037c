"""Load the weights of an official checkpoint into one of our models.

Inside: `Names`, `build_model`, `without_weight_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from itm_fast import models
from itm_fast.compat.checkpoint import StateDict, Weight
from itm_fast.models.base import MatchingModel, load_weights, planned_shapes
from itm_fast.models.weights_file import check_finite

__all__ = ["Names", "build_model", "without_weight_norm"]

# Prefixes of official keys and of our names. None: weights that the official model contains but never uses.
Names = Mapping[str, str | None]


def build_model(
    name: str, config: Mapping[str, Any], parts: Sequence[tuple[StateDict, Names]], source: Path
) -> MatchingModel:
    """Build a model with the weights of a checkpoint. Memory is allocated only after all shapes have been checked.

    Args:
        name: name of the model.
        config: settings of the model.
        parts: each state dict of the file with the names of its keys.
        source: the file, for messages.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: a weight is missing or unknown, has another shape or type, or is not finite. The message names its
            key in the file.
    """
    try:
        expected = planned_shapes(name, config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    weights = {}
    for part, names in parts:
        for key, weight in part.weights.items():
            own = _own_name(key, names)
            if own is None:
                continue
            if own not in expected:
                raise ValueError(f"{source}: {weight.key}: this weight is unknown to {name}")
            if weight.tensor.shape != expected[own]:
                raise ValueError(
                    f"{source}: {weight.key}: expected shape {expected[own]} from the options, "
                    f"got {tuple(weight.tensor.shape)}"
                )
            counts = own.endswith("num_batches_tracked")
            weights[own] = _as_count(weight, source) if counts else _as_float32(weight, source)
    for own in expected:
        if own not in weights:
            raise ValueError(f"{source}: {_official_key(own, parts)}: this weight is missing")
    model = models.create(name, **config)
    load_weights(model, weights, str(source))
    return model.eval()


def _own_name(key: str, names: Names) -> str | None:
    """Return our name for an official key: "" for an unknown key, None for a weight that the model never uses."""
    for prefix, own in names.items():
        if key.startswith(prefix):
            return None if own is None else own + key.removeprefix(prefix)
    return ""


def _official_key(own: str, parts: Sequence[tuple[StateDict, Names]]) -> str:
    """Return the key in the file of one of our weights, for messages."""
    for part, names in parts:
        for prefix, ours in names.items():
            if ours is not None and own.startswith(ours):
                return part.key(prefix + own.removeprefix(ours))
    return own


def without_weight_norm(part: StateDict, name: str, source: Path) -> StateDict:
    """Replace the weight-normalised form of the weight `name` with `name_v * name_g / |name_v|`.

    The norm is taken over all values, as in the official image encoder (`weight_norm(..., dim=None)`), in float64.

    Source: Salimans and Kingma, NeurIPS 2016, Eq 2.

    Args:
        part: the state dict.
        name: name of the weight without the suffixes `_g` and `_v`.
        source: the file, for messages.

    Raises:
        ValueError: a part of the weight is missing, has the wrong shape or type, is not finite, or has norm zero.
    """
    for suffix in ("_g", "_v"):
        if name + suffix not in part.weights:
            raise ValueError(f"{source}: {part.key(name + suffix)}: this weight is missing")
    gain, direction = part.weights[f"{name}_g"], part.weights[f"{name}_v"]
    if gain.tensor.numel() != 1:
        raise ValueError(f"{source}: {gain.key}: expected one value, got shape {tuple(gain.tensor.shape)}")
    for weight in (gain, direction):
        _as_float32(weight, source)
    norm = torch.linalg.vector_norm(direction.tensor.double())
    if norm == 0:
        raise ValueError(f"{source}: {direction.key}: all values are zero, so it has no direction")
    folded = direction.tensor.double() * (gain.tensor.double().reshape(()) / norm)
    rest = {key: weight for key, weight in part.weights.items() if weight not in (gain, direction)}
    return StateDict(part.label, {**rest, name: Weight(direction.key, folded)})


def _as_float32(weight: Weight, source: Path) -> torch.Tensor:
    if not weight.tensor.is_floating_point():
        raise ValueError(f"{source}: {weight.key}: expected floating point values, got {weight.tensor.dtype}")
    values = weight.tensor.to(torch.float32)
    check_finite(values, f"{source}: {weight.key}")
    return values


def _as_count(weight: Weight, source: Path) -> torch.Tensor:
    if weight.tensor.dtype != torch.int64:
        raise ValueError(f"{source}: {weight.key}: expected torch.int64 values, got {weight.tensor.dtype}")
    return weight.tensor
