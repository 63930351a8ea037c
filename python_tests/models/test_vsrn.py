"""VSRN against float64 evaluations of one image at a time, and through training, saving and evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.fragments import Fragments
from itm_fast.nn import RegionReader, RegionReasoning
from python_tests.helpers.gru import directions
from python_tests.helpers.runs import config, make_trainer, run

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 22, 21], [7, 7, 3, 0]])
LENGTHS = torch.tensor([4, 2, 3])


def unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().sum(-1, keepdim=True).sqrt() + 1e-8)


def affine(layer: nn.Linear, rows: Tensor) -> Tensor:
    return rows @ layer.weight.T + layer.bias


def normalized(norm: nn.BatchNorm1d, rows: Tensor) -> Tensor:
    """Apply batch normalisation in training mode: with the mean and the biased variance of all rows."""
    centred = rows - rows.mean(0)
    return centred / (centred.square().mean(0) + norm.eps).sqrt() * norm.weight + norm.bias


def reasoned(layer: RegionReasoning, images: list[Tensor]) -> list[Tensor]:
    """Apply region relationship reasoning by its equations, one pair of regions at a time."""
    messages = []
    for regions in images:
        theta, phi, g = (affine(one, regions) for one in (layer.theta, layer.phi, layer.g))
        rows = []
        for i in range(len(regions)):
            total = torch.zeros_like(regions[0])
            for j in range(len(regions)):
                total = total + (theta[i] * phi[j]).sum() / len(regions) * g[j]
            rows.append(affine(layer.out, total))
        messages.append(torch.stack(rows))
    added = normalized(layer.norm, torch.cat(messages)).split([len(one) for one in images])
    return [regions + part for regions, part in zip(images, added, strict=True)]


def stirred(model: nn.Module) -> nn.Module:
    """Give all batch normalisations random weights: at initialisation, the graph adds nothing."""
    random = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.weight.copy_(0.5 + torch.rand(part.weight.shape, generator=random))
                part.bias.copy_(torch.randn(part.bias.shape, generator=random))
    return model


@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 1, 6], [4]])
def test_region_reasoning_equals_its_equations(lengths: list[int]) -> None:
    """Full and ragged images: values and gradients agree in float64, and values agree in float32 within rounding."""
    torch.manual_seed(0)
    layer = stirred(RegionReasoning(6)).double()
    images = [torch.randn(length, 6, dtype=torch.float64, requires_grad=True) for length in lengths]
    found = layer(Fragments.from_list(images)).values
    expected = torch.cat(reasoned(layer, images))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn_like(expected)
    of_found, of_expected = (
        torch.autograd.grad((values * weight).sum(), [*layer.parameters(), *images]) for values in (found, expected)
    )
    for ours, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    low = layer.float()(Fragments.from_list([image.detach().float() for image in images])).values
    torch.testing.assert_close(low.double(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_fresh_layer_is_the_identity() -> None:
    torch.manual_seed(0)
    regions = Fragments(torch.randn(7, 6), torch.tensor([0, 3, 3, 7]))
    assert torch.equal(RegionReasoning(6)(regions).values, regions.values)


@pytest.mark.parametrize("lengths", [[3, 5, 1], [4, 4]])
def test_the_reader_ends_in_the_last_state_of_its_gru(lengths: list[int]) -> None:
    torch.manual_seed(0)
    reader = RegionReader(6).double()
    images = [torch.randn(length, 6, dtype=torch.float64) for length in lengths]
    expected = torch.stack([directions(reader.rnn, image)[0][-1] for image in images])
    torch.testing.assert_close(reader(Fragments.from_list(images)), expected)


@pytest.mark.parametrize(("normalize_regions", "image_batch_norm"), [(True, False), (False, True)])
def test_scores_fragments_and_gradients_equal_the_definition(normalize_regions: bool, image_batch_norm: bool) -> None:
    """The settings of the public code for both data sets, with batch normalisation in training mode."""
    torch.manual_seed(0)
    options = {"normalize_regions": normalize_regions, "image_batch_norm": image_batch_norm, "graph_layers": 2}
    model = stirred(models.create("vsrn", **SIZES, **options))
    exact = models.create("vsrn", **SIZES, **options).double()
    exact.load_state_dict(model.state_dict())
    features = torch.randn(4, 5, 10, dtype=torch.float64)
    regions = [affine(exact.image_encoder.fc, image) for image in features]
    if normalize_regions:
        regions = [unit(image) for image in regions]
    for layer in exact.graph:
        regions = reasoned(layer, regions)
    regions = [unit(image) for image in regions]
    images = torch.stack([directions(exact.reader.rnn, image)[0][-1] for image in regions])
    images = unit(normalized(exact.image_norm, images) if image_batch_norm else images)
    states = [
        directions(exact.text_encoder.rnn, exact.text_encoder.embed.weight[ids[:length]])[0]
        for ids, length in zip(IDS, LENGTHS.tolist(), strict=True)
    ]
    expected = images @ torch.stack([unit(one[-1]) for one in states]).T

    scores = model(features.float(), IDS, LENGTHS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    encoded = model.encode_fragments(features.float(), IDS, LENGTHS)
    torch.testing.assert_close(encoded.regions.values.double(), torch.cat(regions), rtol=0, atol=1e-5)
    torch.testing.assert_close(encoded.words.values.double(), unit(torch.cat(states)), rtol=0, atol=1e-5)
    assert (encoded.regions.lengths.tolist(), encoded.words.lengths.tolist()) == ([5] * 4, LENGTHS.tolist())
    torch.testing.assert_close(model.score(encoded.images, encoded.captions).double(), expected, rtol=0, atol=1e-5)

    weight = torch.randn(4, 3, dtype=torch.float64)
    (exact(features, IDS, LENGTHS) * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in exact.named_parameters()}
    exact.zero_grad()
    (expected * weight).sum().backward()
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-10, msg=name)


def test_published_defaults() -> None:
    with torch.device("meta"):
        model = models.create("vsrn", vocab_size=30)
    assert (model.image_encoder.fc.weight.shape, model.text_encoder.embed.weight.shape) == ((2048, 2048), (30, 300))
    assert (len(model.graph), model.graph[0].theta.weight.shape) == (4, (2048, 2048))
    assert (model.reader.rnn.hidden_size, model.text_encoder.rnn.bidirectional) == (2048, False)
    assert (model.image_norm, model.fragment_dim) == (None, 2048)


def test_ragged_images_are_their_own_regions_alone() -> None:
    torch.manual_seed(0)
    model = stirred(models.create("vsrn", **SIZES, image_batch_norm=True)).eval()
    rows = torch.randn(6, 10)
    ragged = model.encode_images(Fragments(rows, torch.tensor([0, 2, 2, 6])))
    alone = [model.encode_images(part[None])[0] for part in (rows[:2], rows[2:])]
    torch.testing.assert_close(ragged[[0, 2]], torch.stack(alone))
    assert ragged[1].tolist() == [0.0] * 12, "an image without regions"
    order = torch.tensor([3, 1, 0, 2])
    assert not torch.allclose(model.encode_images(rows[2:][order][None]), alone[1][None], atol=1e-3), "an order"


def test_empty_sets_score_zero_and_get_no_gradient() -> None:
    model = stirred(models.create("vsrn", **SIZES))
    scores = model(torch.zeros(2, 0, 10), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]))
    assert scores.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    scores = model(torch.randn(2, 3, 10), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]))
    assert scores[:, 0].tolist() == [0.0, 0.0]
    scores.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^graph_layers: expected a number at least 1 and at most 64, got 0$"):
        models.create("vsrn", **SIZES, graph_layers=0)


def test_training_saving_and_evaluating(data: Path, tmp_path: Path) -> None:
    """A run learns, the saved model gives the same scores, and the command line evaluates it."""
    out = tmp_path / "run"
    settings = config(data, out, model="vsrn", model_options={"embed_dim": 32, "word_dim": 12}, epochs=16)
    trainer = make_trainer(settings)
    untrained = evaluation.evaluate(trainer.model, trainer.validation_data)["rsum"]
    result = run(settings)
    assert result.best["rsum"] > untrained + 100
    dev = PrecomputedDataset(data, "dev", Vocabulary.from_file(out / "vocab.json"))
    assert evaluation.evaluate(models.load(out), dev) == result.best
    file = tmp_path / "result.json"
    command = ["evaluate", "--checkpoint", str(out), "--data", str(data), "--split", "dev", "--json", str(file)]
    assert cli.run(command) == 0
    assert json.loads(file.read_text())["rsum"] == result.best["rsum"]
