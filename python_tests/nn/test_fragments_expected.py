"""Modules and functions that take `Fragments` name them, and how to make them, where they are given a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from itm_fast import Fragments, nn

PADDED = torch.ones(2, 4, 8)
SETS = Fragments.from_padded(PADDED)
IDS, LENGTHS = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3])
HOW = r"expected Fragments, got a float32 tensor of shape \(2, 4, 8\); pack padded sets by Fragments\.from_padded"
OF_ONE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mean_pool": ("fragments", nn.mean_pool),
    "final_states": ("states", nn.final_states),
    "RegionAttention": ("sets", nn.RegionAttention(8)),
    "SelfAttentionLayer": ("sets", nn.SelfAttentionLayer(8)),
    "PhrasePooling": ("words", nn.PhrasePooling(8, 4)),
    "ExternalSpacePooling": ("sets", nn.ExternalSpacePooling(8)),
    "FeatureConversions": ("base", nn.FeatureConversions(2, 8, 8)),
    "FeatureReweighting": ("base", nn.FeatureReweighting(2, 8)),
    "FeatureDiversification": ("base", nn.FeatureDiversification(2, 8, 8)),
    "RegionReasoning": ("regions", nn.RegionReasoning(8)),
    "RegionReader": ("regions", nn.RegionReader(8)),
    "CaptionDecoder": ("regions", lambda sets: nn.CaptionDecoder(8, 5)(sets, IDS, LENGTHS)),
    "RecurrentAggregationRegulator": ("alignments", nn.RecurrentAggregationRegulator(8, 1)),
}
OF_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "AttentionPeak": nn.AttentionPeak(),
    "MessagePassing": nn.MessagePassing(8),
    "NegativeAwareSimilarity": nn.NegativeAwareSimilarity(),
    "PatchSlimming": nn.PatchSlimming(8, 4),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_a_padded_tensor_in_place_of_sets(name: str) -> None:
    argument, call = OF_ONE[name]
    with pytest.raises(TypeError, match=f"^{argument}: {HOW}"):
        call(PADDED)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_padded_tensor_in_place_of_one_side(name: str) -> None:
    with pytest.raises(TypeError, match=f"^images: {HOW}"):
        OF_PAIRS[name](PADDED, SETS)
    with pytest.raises(TypeError, match=f"^captions: {HOW}"):
        OF_PAIRS[name](SETS, PADDED)


def test_a_list_in_place_of_sets() -> None:
    with pytest.raises(TypeError, match=r"^fragments: expected Fragments, got a list; .* by Fragments\.from_list"):
        nn.mean_pool(list(PADDED))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [list(torch.ones(2, 4, 12)), "regions", None])
def test_regions_with_boxes_of_another_type(value: object) -> None:
    found = type(value).__name__
    with pytest.raises(TypeError, match=rf"^features: expected a tensor \(n, k, 12\) or Fragments, got {found}$"):
        nn.PositionEncoder(8, 4)(value)  # type: ignore[arg-type]


def test_the_check_compiles() -> None:
    compiled = torch.compile(nn.mean_pool, fullgraph=True, backend="eager")
    assert torch.equal(compiled(SETS), torch.ones(2, 8))
