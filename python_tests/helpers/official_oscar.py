"""OSCAR's score of one image and one caption in float64, without padding, and random weights for it.

Inside: `random_oscar`, `official_score`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from python_tests.helpers.bert import SIZES, BertLoop, random_bert


def random_oscar(width: int, *, norm: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict with the official names, with weights far from the usual initialisation."""
    random = torch.Generator().manual_seed(seed)
    dim = SIZES["hidden_size"]

    def tensor(*shape: int) -> torch.Tensor:
        return 0.4 * torch.randn(*shape, generator=random)

    weights = {f"bert.{name}": value for name, value in random_bert(seed).items()}
    for name, inputs, outputs in (
        ("bert.pooler.dense", dim, dim), ("bert.img_embedding", width, dim), ("classifier", dim, 2)
    ):  # fmt: skip
        weights[f"{name}.weight"], weights[f"{name}.bias"] = tensor(outputs, inputs), tensor(outputs)
    if norm:
        weights["bert.LayerNorm.weight"], weights["bert.LayerNorm.bias"] = 1 + tensor(dim), tensor(dim)
    return weights


def official_score(
    weights: Mapping[str, torch.Tensor],
    regions: np.ndarray,
    caption: Sequence[int],
    tags: Sequence[int] = (),
    heads: int = SIZES["num_attention_heads"],
) -> float:
    """Compute the log-odds of a match of regions (k, f), a caption and tags, both as piece ids with `[SEP]`.

    Source: Li et al., ECCV 2020, section 3, and the official code of its retrieval.
    """
    bert = BertLoop({name.removeprefix("bert."): value for name, value in weights.items()}, heads)
    embedded = bert.linear("img_embedding", regions.astype(np.float64))
    if "LayerNorm.weight" in bert.weights:
        embedded = bert.norm("LayerNorm", embedded)
    rows = [bert.embedded(list(caption)), bert.embedded(list(tags), 1, len(caption)), embedded]
    first = bert.layers(np.concatenate(rows))[0]
    other, match = bert.linear("classifier", np.tanh(bert.linear("pooler.dense", first)))
    odds = float(match - other)
    assert math.isclose(1 / (1 + math.exp(-odds)), math.exp(match) / (math.exp(match) + math.exp(other)))
    return odds
