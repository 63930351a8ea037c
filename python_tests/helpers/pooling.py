"""Generalized pooling from its definition, set by set and channel by channel.

Inside: `pooling_weights`, `pooled`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from itm_fast.nn import GeneralizedPooling
from python_tests.helpers.gru import gru_states


def pooling_weights(pool: GeneralizedPooling, length: int) -> Tensor:
    """Compute the weights (length,) in the dtype of the module."""
    width = pool.gru.input_size
    places = [
        [wave(place / 10000 ** (2 * i / width)) for i in range(width // 2) for wave in (math.sin, math.cos)]
        for place in range(length)
    ]
    states = gru_states(pool.gru, torch.tensor(places, dtype=pool.linear.weight.dtype))
    powers = (states @ pool.linear.weight[0] / 0.1).exp()
    return powers / powers.sum()


def pooled(pool: GeneralizedPooling, rows: Tensor) -> Tensor:
    """Pool a set of rows (L, d) into a vector (d,)."""
    weights = pooling_weights(pool, len(rows))
    channels = [sum(w * v for w, v in zip(weights, sorted(channel, reverse=True), strict=True)) for channel in rows.T]
    return torch.stack(channels)
