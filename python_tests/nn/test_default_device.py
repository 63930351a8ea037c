"""A default device other than that of the arguments does not matter, and exports say what they cannot do."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree

from itm_fast import Fragments, nn

IDS, LENGTHS = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
SETS = Fragments(torch.linspace(-1, 1, 40).view(5, 8), torch.tensor([0, 3, 5]))


def test_modules_compute_on_the_device_of_their_arguments() -> None:
    for module, arguments in (
        (nn.TextEncoder(5, 8), (IDS, LENGTHS)),
        (nn.RegionReader(8), (SETS,)),
        (nn.GeneralizedPooling(), (SETS,)),
        (nn.CaptionDecoder(8, 5), (SETS, IDS, LENGTHS)),
    ):
        module.eval()
        expected = module(*arguments)
        with torch.device("meta"):
            found = module(*arguments)
        pairs = zip(_pytree.tree_leaves(found), _pytree.tree_leaves(expected), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_an_exported_image_encoder_returns_fragments() -> None:
    encoder, features = nn.ImageEncoder(6, 4), torch.ones(2, 3, 6)
    found = torch.export.export(encoder, (features,)).module()(features)
    assert torch.equal(found.values, encoder(features).values)
    assert found.offsets.tolist() == [0, 3, 6]


def test_an_export_of_a_caption_encoder_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"lengths: torch\.export does not know their values.*export_onnx"):
        torch.export.export(nn.TextEncoder(5, 8), (IDS, LENGTHS))
