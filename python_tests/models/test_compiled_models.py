"""Models under torch.compile: recurrent networks stay outside of its graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from itm_fast import models


@pytest.mark.parametrize("name", ["scan", "vse_infty", "vsrn"])
def test_compiled_models_have_the_same_gradients_from_few_graphs(name: str) -> None:
    torch.manual_seed(0)
    model = models.create(name, vocab_size=20, feature_dim=24, embed_dim=16, word_dim=8)
    images = torch.randn(3, 5, 24)
    token_ids, lengths = torch.randint(1, 20, (3, 6)), torch.tensor([6, 3, 4])

    def loss() -> torch.Tensor:
        return model.score(model.encode_images(images), model.encode_captions(token_ids, lengths)).sum()

    def gradients(value: torch.Tensor) -> list[torch.Tensor]:
        weights = [one for one in model.parameters() if one.requires_grad]
        return list(torch.autograd.grad(value, weights, allow_unused=True))

    torch._dynamo.reset()
    graphs = CompileCounter()
    expected, found = gradients(loss()), gradients(torch.compile(loss, backend=graphs)())
    torch.testing.assert_close(found, expected)
    # Steps of the recurrent networks in a graph would make at least ten.
    assert 1 <= graphs.frame_count <= 6
