"""SAEM against float64 loops over one image and one caption at a time, and its training with a frozen BERT."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import PhrasePooling, SelfAttentionLayer
from python_tests.helpers.bert import PIECES, bert_states, random_bert, write_bert
from python_tests.helpers.gru import gru_states
from python_tests.helpers.runs import config, run, same, weights

SIZES = {
    "vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7, "attention_heads": 3,
    "attention_hidden_dim": 9, "phrase_channels": 5,
}  # fmt: skip
BERT = {
    "text_encoder": "bert", "bert_dim": 24, "bert_layers": 2, "bert_heads": 12, "bert_hidden_dim": 20,
    "bert_max_length": 16,
}  # fmt: skip
IDS = torch.tensor([[1, 5, 2, 9, 4], [4, 2, 22, 0, 0], [7, 7, 3, 0, 0], [6, 0, 0, 0, 0]])
LENGTHS = torch.tensor([5, 2, 3, 1])


def affine(layer: nn.Linear, row: Tensor) -> Tensor:
    return layer.weight @ row + layer.bias


def norm(layer: nn.LayerNorm, row: Tensor) -> Tensor:
    centred = row - row.mean()
    return centred / (centred.square().mean() + 1e-12).sqrt() * layer.weight + layer.bias


def gelu(row: Tensor) -> Tensor:
    return row * (1 + torch.erf(row / math.sqrt(2))) / 2


def attended(layer: SelfAttentionLayer, regions: Tensor) -> Tensor:
    """Apply the layer by its equations, one region and one head at a time."""
    queries, keys, values = ([affine(part, row) for row in regions] for part in (layer.query, layer.key, layer.value))
    size = regions.shape[1] // layer.heads
    result = []
    for number, row in enumerate(regions):
        parts = []
        for head in range(layer.heads):
            own = slice(head * size, (head + 1) * size)
            powers = [math.e ** ((queries[number][own] @ key[own]) / math.sqrt(size)) for key in keys]
            parts.append(sum(power * value[own] for power, value in zip(powers, values, strict=True)) / sum(powers))
        mixed = norm(layer.attention_norm, row + affine(layer.out, torch.cat(parts)))
        hidden = gelu(affine(layer.perceptron[0], mixed))
        result.append(norm(layer.norm, mixed + affine(layer.perceptron[2], hidden)))
    return torch.stack(result)


def phrased(pooling: PhrasePooling, words: Tensor) -> Tensor:
    """Pool a caption by the equations, one phrase at a time."""
    strongest = []
    for layer in pooling.convolutions:
        width = layer.weight.shape[2]
        rows = torch.cat([words, words.new_zeros(max(width - len(words), 0), words.shape[1])])
        phrases = []
        for start in range(len(rows) - width + 1):
            total = layer.bias
            for place in range(width):
                total = total + layer.weight[:, :, place] @ rows[start + place]
            phrases.append(total.clamp(min=0))
        strongest.append(torch.stack(phrases).max(0).values)
    return affine(pooling.fc, torch.cat(strongest))


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def expected_images(model: nn.Module, images: list[Tensor]) -> Tensor:
    vectors = []
    for regions in images:
        rows = torch.stack([affine(model.image_encoder.fc, row) for row in regions])
        for layer in model.region_layers:
            rows = attended(layer, rows)
        vectors.append(unit(rows.mean(0)))
    return torch.stack(vectors)


def make(**options: object) -> tuple[nn.Module, nn.Module]:
    """Return a model in evaluation mode, and the same in float64."""
    torch.manual_seed(0)
    model = models.create("saem", **{**SIZES, **options}).eval()
    exact = models.create("saem", **{**SIZES, **options}).double().eval()
    exact.load_state_dict(model.state_dict())
    return model, exact


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 1, 5]])
def test_scores_and_gradients_equal_the_definition(lengths: list[int]) -> None:
    """With a GRU, full and ragged images, and captions shorter than the widest phrase."""
    model, exact = make(attention_layers=2)
    images = [torch.randn(length, 10, dtype=torch.float64) for length in lengths]
    states = [gru_states(exact.text_encoder.rnn, exact.text_encoder.embed.weight[ids[:length]])
              for ids, length in zip(IDS, LENGTHS.tolist(), strict=True)]  # fmt: skip
    captions = torch.stack([unit(phrased(exact.phrases, words)) for words in states])
    expected = expected_images(exact, images) @ captions.T
    regions = Fragments.from_list(images)
    scores = model(regions.to(torch.float32), IDS, LENGTHS)
    assert scores.dtype == torch.float32
    assert float(expected.detach().std()) > 0.05
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-6)

    weight = torch.randn_like(expected)
    found = torch.autograd.grad((exact(regions, IDS, LENGTHS) * weight).sum(), list(exact.parameters()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(exact.parameters()))
    for (name, _), ours, theirs in zip(exact.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10, msg=name)


def test_the_phrases_of_bert_equal_the_definition() -> None:
    """The convolutions see BERT's states without a linear layer, and BERT does not learn unless it may."""
    model, exact = make(**{**BERT, "vocab_size": len(PIECES)})
    own = random_bert()
    for one in (model, exact):
        one.text_encoder.bert.load_state_dict(own)
    ids, lengths = torch.tensor([[2, 11, 5, 6, 3], [2, 3, 0, 0, 0], [2, 8, 9, 10, 3]]), torch.tensor([5, 2, 4])
    pairs = zip(ids.tolist(), lengths.tolist(), strict=True)
    states = [torch.from_numpy(bert_states(own, row[:length])) for row, length in pairs]
    expected = torch.stack([unit(phrased(exact.phrases, words)) for words in states])
    torch.testing.assert_close(exact.encode_captions(ids, lengths), expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(model.encode_captions(ids, lengths).double(), expected, rtol=0, atol=5e-6)
    assert not any(name.startswith("text_encoder.fc") for name in model.state_dict())
    learning = models.create("saem", **{**SIZES, **BERT, "freeze_bert": False})
    assert {one.requires_grad for one in model.text_encoder.parameters()} == {False}
    assert {one.requires_grad for one in learning.text_encoder.parameters()} == {True}


def test_empty_sets_score_zero_and_get_no_gradient() -> None:
    model, _ = make()
    features = Fragments(torch.randn(3, 10), torch.tensor([0, 3, 3]))
    scores = model(features, IDS[:2], torch.tensor([0, 2]))
    assert (scores[1].tolist(), scores[0, 0].item()) == ([0.0, 0.0], 0.0)
    assert scores[0, 1].item() != 0.0
    scores.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model(torch.zeros(2, 0, 10), IDS[:1, :0], torch.tensor([0])).tolist() == [[0.0], [0.0]]


def test_the_order_of_regions_does_not_matter_and_that_of_words_does() -> None:
    _, exact = make()
    features = torch.randn(1, 4, 10, dtype=torch.float64)
    images = exact.encode_images(torch.cat([features, features[:, [2, 0, 3, 1]]]))
    torch.testing.assert_close(images[0], images[1], rtol=1e-10, atol=1e-12)
    words = Fragments.from_padded(torch.randn(1, 4, 12, dtype=torch.float64))
    turned = words.with_values(words.values[[3, 2, 1, 0]])
    assert float((exact.phrases(words) - exact.phrases(turned)).detach().abs().max()) > 1e-3


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^attention_heads: expected a divisor of embed_dim 12, got 5$"):
        models.create("saem", **{**SIZES, "attention_heads": 5})
    with pytest.raises(ValueError, match=r"^heads: expected a divisor of the width 8, got 3$"):
        SelfAttentionLayer(8, heads=3)


def test_published_defaults() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = models.create("saem", vocab_size=30, text_encoder="bert")
    assert [tuple(layer.weight.shape) for layer in model.phrases.convolutions] == [(512, 768, n) for n in (1, 2, 3)]
    assert (model.phrases.fc.weight.shape, model.image_encoder.fc.weight.shape) == ((256, 1536), (256, 2048))


def test_a_frozen_bert_trains_and_resumes(data: Path, tmp_path: Path) -> None:
    """The weights of BERT stay those of the folder; a resumed run equals an uninterrupted one, bit for bit."""
    folder = write_bert(tmp_path / "bert")
    options = {"embed_dim": 16, "phrase_channels": 12, "attention_hidden_dim": 16}
    settings = config(data, tmp_path / "whole", model="saem", bert=str(folder), model_options=options)
    run(settings)
    learned = weights(tmp_path / "whole")
    for name, weight in random_bert().items():
        assert torch.equal(learned[f"text_encoder.bert.{name}"], weight), name
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    assert run(attrs.evolve(parts, epochs=2), resume=True).steps == 8
    assert same(learned, weights(tmp_path / "parts"))
