"""Settings of the SCAN text encoder: GRU layers and word dropout."""

from __future__ import annotations

import pytest
import torch

from itm_fast import models
from itm_fast.nn import TextEncoder, l2norm

IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 0, 0], [7, 7, 3, 0]])
LENGTHS = torch.tensor([4, 2, 3])


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_layers_run_on_top_of_each_other(num_layers: int) -> None:
    """Several layers equal a chain of one-layer networks: both directions of a layer are the input of the next."""
    torch.manual_seed(3)
    encoder = TextEncoder(10, 6, word_dim=5, num_layers=num_layers)
    layers = []
    for layer in range(num_layers):
        single = torch.nn.GRU(12 if layer else 5, 6, bidirectional=True)
        single.load_state_dict(
            {
                name.replace(f"_l{layer}", "_l0"): value
                for name, value in encoder.rnn.state_dict().items()
                if f"_l{layer}" in name
            }
        )
        layers.append(single)
    expected = []
    for ids, length in zip(IDS, LENGTHS, strict=True):
        states = encoder.embed.weight[ids[:length]]
        for layer in layers:
            states = layer(states)[0]
        expected.append(l2norm((states[:, :6] + states[:, 6:]) / 2))
    torch.testing.assert_close(encoder(IDS, LENGTHS).values, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_layers_of_the_model_are_those_of_its_setting() -> None:
    model = models.create("scan", vocab_size=10, feature_dim=4, embed_dim=6, word_dim=5, num_layers=2)
    assert model.text_encoder.rnn.num_layers == 2


def test_word_dropout_drops_its_share_in_training_alone() -> None:
    torch.manual_seed(0)
    model = models.create("scan", vocab_size=10, feature_dim=4, embed_dim=6, word_dim=500, word_dropout=0.4)
    seen = []
    model.text_encoder.dropout.register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output)))
    model.train().encode_captions(IDS, LENGTHS)
    words, dropped = seen.pop()
    kept = dropped != 0
    # 9 words of 500 values: the dropped share has a standard deviation of 0.0073.
    assert float((~kept).double().mean()) == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(dropped[kept], words[kept] / 0.6)
    model.eval().encode_captions(IDS, LENGTHS)
    words, dropped = seen.pop()
    assert torch.equal(words, dropped)
