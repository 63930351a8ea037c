"""Fake and meta tensors outside of torch.compile: shapes of the results, or one line that names what has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import itm_fast.functional as F_itm
from itm_fast import Fragments, nn

pytestmark = pytest.mark.filterwarnings("ignore:itm_fast runs on the packed reference:itm_fast.FallbackWarning")
NO_VALUES = "expected a tensor with values, got a fake or meta tensor, which has only a shape"


@pytest.fixture(params=["fake", "meta"])
def without_values(request: pytest.FixtureRequest) -> Iterator[None]:
    with FakeTensorMode() if request.param == "fake" else torch.device("meta"):
        yield


def padded() -> Tensor:
    return torch.ones(2, 4, 8)


CALLS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "offsets": (lambda: Fragments(torch.ones(7, 8), torch.tensor([0, 4, 7])).values, (7, 8)),
    "from_padded": (lambda: Fragments.from_padded(padded(), torch.tensor([4, 3])).values, (8, 8)),
    "mask": (lambda: Fragments.from_padded(padded(), mask=torch.ones(2, 4, dtype=torch.bool)).lengths, (2,)),
    "cross_attention_scores": (lambda: F_itm.cross_attention_scores(*[Fragments.from_padded(padded())] * 2), (2, 2)),
    "maxsim_scores": (lambda: F_itm.maxsim_scores(*[Fragments.from_padded(padded())] * 2), (2, 2)),
    "RegulatedSimilarity": (lambda: nn.RegulatedSimilarity(8, 4)(*[Fragments.from_padded(padded())] * 2), (2, 2)),
    "triplet_loss": (lambda: F_itm.triplet_loss(torch.ones(4, 4)), ()),
    "retrieval_ranks": (lambda: F_itm.retrieval_ranks(torch.ones(2, 4), torch.tensor([0, 0, 1, 1]))[1], (4,)),
    "ImageEncoder": (lambda: nn.ImageEncoder(8, 5)(padded()).values, (8, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_have_shapes(without_values: None, name: str) -> None:
    call, shape = CALLS[name]
    assert call().shape == shape


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Fragments(torch.ones(7, 8), torch.tensor([0, 4, 7])).max_length, "offsets"),
        (lambda: Fragments.from_padded(padded(), torch.tensor([4, 3])).trimmed(), "offsets"),
        (lambda: nn.TextEncoder(5, 8)(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 2])), "lengths"),
        (lambda: nn.GeneralizedPooling()(padded()), "features"),
        (lambda: nn.GradientSparseScores(nn.AttentionPeak())(*[Fragments.from_padded(padded())] * 2), "images"),
    ],
)
def test_what_needs_values_is_named(without_values: None, call: Callable[[], Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: {NO_VALUES}$"):
        call()
