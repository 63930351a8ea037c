"""Weights of an official checkpoint into one of our models.

Inside: `build_model`, `without_weight_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from itm_fast import models
from itm_fast.compat.checkpoint import Weight
from itm_fast.models.base import MatchingModel, load_weights, planned_shapes
from itm_fast.models.weights_file import check_finite

__all__ = ["build_model", "without_weight_norm"]


def build_model(
    name: str, config: Mapping[str, Any], parts: Mapping[str, dict[str, Weight]], source: Path
) -> MatchingModel:
    """The model `name` with the weights of `parts`: prefix of our names to the weights of that module.

    Raises:
        ValueError: a weight is missing, unknown, of another shape or type, or not finite; the message names its key in
            the file `source`. Nothing of the model's size is allocated before shapes are known to fit.
    """
    try:
        expected = planned_shapes(name, config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    weights = {}
    for prefix, part in parts.items():
        for key, weight in part.items():
            own = prefix + key
            if own not in expected:
                raise ValueError(f"{source}: {weight.key}: this weight is unknown to {name}")
            if weight.tensor.shape != expected[own]:
                raise ValueError(
                    f"{source}: {weight.key}: expected shape {expected[own]} by the options, "
                    f"got {tuple(weight.tensor.shape)}"
                )
            weights[own] = _as_float32(weight, source)
    for index, (prefix, part) in enumerate(parts.items()):
        for own in expected:
            key = own.removeprefix(prefix)
            if own.startswith(prefix) and key not in part:
                raise ValueError(f"{source}: model[{index}][{key!r}]: this weight is missing")
    model = models.create(name, **config)
    load_weights(model, weights, str(source))
    return model.eval()


def without_weight_norm(part: dict[str, Weight], name: str, source: Path) -> dict[str, Weight]:
    """`part` with the weight `name` in place of its weight-normalised form: `name_v * name_g / |name_v|`.

    The norm is that of all values together, as in the official image encoder (`weight_norm(..., dim=None)`; Salimans
    and Kingma, NeurIPS 2016, Eq 2). It is computed in float64.
    """
    for suffix in ("_g", "_v"):
        if name + suffix not in part:
            raise ValueError(f"{source}: model[0][{name + suffix!r}]: this weight is missing")
    gain, direction = part[f"{name}_g"], part[f"{name}_v"]
    if gain.tensor.numel() != 1:
        raise ValueError(f"{source}: {gain.key}: expected one value, got shape {tuple(gain.tensor.shape)}")
    for weight in (gain, direction):
        _as_float32(weight, source)
    norm = torch.linalg.vector_norm(direction.tensor.double())
    if norm == 0:
        raise ValueError(f"{source}: {direction.key}: all values are zero, so that it has no direction")
    folded = direction.tensor.double() * (gain.tensor.double().reshape(()) / norm)
    rest = {key: weight for key, weight in part.items() if weight not in (gain, direction)}
    return {**rest, name: Weight(direction.key, folded)}


def _as_float32(weight: Weight, source: Path) -> torch.Tensor:
    if not weight.tensor.is_floating_point():
        raise ValueError(f"{source}: {weight.key}: expected floating point values, got {weight.tensor.dtype}")
    values = weight.tensor.to(torch.float32)
    check_finite(values, f"{source}: {weight.key}")
    return values
