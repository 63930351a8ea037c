"""Modules refuse sizes that are no whole numbers of at least 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from itm_fast import nn

# The sizes of each module by name, all valid.
SIZES: dict[Callable[..., Any], tuple[str, ...]] = {
    nn.CaptionDecoder: ("dim", "vocab_size", "hidden_dim", "word_dim"),
    nn.ExternalSpacePooling: ("dim",),
    nn.FeatureConversions: ("count", "feature_dim", "embed_dim"),
    nn.FeatureReweighting: ("count", "feature_dim"),
    nn.ImageEncoder: ("feature_dim", "embed_dim"),
    nn.MessagePassing: ("dim", "heads", "alignment_dim"),
    nn.PatchEncoder: ("feature_dim", "embed_dim"),
    nn.PatchSlimming: ("dim", "n_regions"),
    nn.PhrasePooling: ("word_dim", "dim", "channels"),
    nn.PositionEncoder: ("feature_dim", "embed_dim", "grid", "blocks", "position_dim"),
    nn.RegionAttention: ("dim", "heads"),
    nn.RegionReader: ("dim",),
    nn.RegionReasoning: ("dim",),
    nn.ResidualImageEncoder: ("feature_dim", "embed_dim"),
    nn.SelfAttentionLayer: ("dim", "heads", "hidden_dim"),
    nn.TextEncoder: ("vocab_size", "embed_dim", "word_dim", "num_layers"),
}


@pytest.mark.parametrize("make", SIZES, ids=lambda make: make.__name__)
def test_sizes_below_one(make: Callable[..., Any]) -> None:
    good = dict.fromkeys(SIZES[make], 12)
    make(**good)
    for name in good:
        for size in (0, -3, 2.5, True):
            with pytest.raises(ValueError, match=f"^{name}: expected a whole number of at least 1, got {size}$"):
                make(**{**good, name: size})


def test_sizes_of_numpy_are_accepted() -> None:
    assert nn.ImageEncoder(np.int64(5), np.int64(4)).fc.weight.shape == (4, 5)  # type: ignore[arg-type]


def test_the_phrases_have_widths() -> None:
    with pytest.raises(ValueError, match=r"^widths: expected at least one number of words, got none$"):
        nn.PhrasePooling(8, 4, widths=())
    with pytest.raises(ValueError, match=r"^widths: expected a whole number of at least 1, got 0$"):
        nn.PhrasePooling(8, 4, widths=(1, 0))


def test_a_class_token_alone_is_no_picture() -> None:
    with pytest.raises(ValueError, match=r"^n_regions: expected a whole number of at least 2, got 1$"):
        nn.PatchSlimming(8, 1, class_token=True)


def test_a_negative_number_of_words() -> None:
    with pytest.raises(ValueError, match=r"^threshold_words: expected a whole number of at least 0, got -1$"):
        nn.NegativeAwareSimilarity(threshold_words=-1)
