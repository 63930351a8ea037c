"""The residual image encoders against their formula in float64, and their batch normalisation on ragged regions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import ResidualImageEncoder

KINDS = pytest.mark.parametrize("projected", [False, True])


def moments(encoder: ResidualImageEncoder, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the hidden layer makes of rows before the normalisation, its mean and its biased variance, in float64."""
    weights = {name: value.detach().double() for name, value in encoder.state_dict().items()}
    rows = rows.double()
    projected = rows @ weights["fc.weight"].T + weights["fc.bias"]
    hidden = (projected if encoder.projected else rows) @ weights["mlp.0.weight"].T + weights["mlp.0.bias"]
    return hidden, hidden.mean(0), (hidden - hidden.mean(0)).square().mean(0)


def expected(encoder: ResidualImageEncoder, rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    weights = {name: value.detach().double() for name, value in encoder.state_dict().items()}
    hidden = moments(encoder, rows)[0]
    normed = (hidden - mean) / (variance + 1e-5).sqrt() * weights["mlp.1.weight"] + weights["mlp.1.bias"]
    residual = normed.clamp(min=0) @ weights["mlp.3.weight"].T + weights["mlp.3.bias"]
    result = rows.double() @ weights["fc.weight"].T + weights["fc.bias"] + residual
    return result / result.square().sum(1, keepdim=True).sqrt()


def make(projected: bool) -> ResidualImageEncoder:
    torch.manual_seed(0)
    encoder = ResidualImageEncoder(10, 12, projected=projected)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


@KINDS
def test_values_in_training_and_evaluation(projected: bool) -> None:
    encoder = make(projected)
    assert encoder.mlp[0].weight.shape == (6, 12 if projected else 10)
    first, second = torch.randn(4, 5, 10), 3 + torch.randn(3, 5, 10)
    mean, variance = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for features in (first, second):
        rows = features.reshape(-1, 10)
        _, batch_mean, batch_variance = moments(encoder, rows)
        result = encoder(features)
        torch.testing.assert_close(
            result.values.double(), expected(encoder, rows, batch_mean, batch_variance), rtol=1e-5, atol=2e-6
        )
        mean = 0.9 * mean + 0.1 * batch_mean
        variance = 0.9 * variance + 0.1 * batch_variance * len(rows) / (len(rows) - 1)
    encoder.eval()
    rows = first.reshape(-1, 10)
    torch.testing.assert_close(
        encoder(first).values.double(), expected(encoder, rows, mean, variance), rtol=1e-5, atol=2e-6
    )


@KINDS
def test_normalisation_sees_no_padding(projected: bool) -> None:
    """Whatever stands behind the regions, results, statistics and gradients are those of the regions alone."""
    lengths, ends = torch.tensor([3, 0, 5, 1]), [0, 3, 3, 8, 9]
    real = torch.randn(9, 10)
    results = []
    for padding in (0.0, 1e6):
        padded = torch.full((4, 5, 10), padding)
        for index, length in enumerate(lengths.tolist()):
            padded[index, :length] = real[ends[index] : ends[index + 1]]
        encoder = make(projected)
        regions = encoder(Fragments.from_padded(padded, lengths))
        regions.values.square().sum(1).log().sum().backward()
        regions.values.detach_()
        results.append((regions.values, encoder.mlp[1].running_mean, encoder.mlp[0].weight.grad))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    encoder = make(projected)
    _, mean, variance = moments(encoder, real)
    torch.testing.assert_close(results[0][0].double(), expected(encoder, real, mean, variance), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(results[0][1].double(), 0.1 * mean, rtol=1e-5, atol=1e-6)


@KINDS
def test_start_of_the_weights(projected: bool) -> None:
    torch.manual_seed(0)
    encoder = ResidualImageEncoder(40, 60, projected=projected)
    bound = math.sqrt(6 / 100)
    assert float(encoder.fc.weight.detach().abs().max()) <= bound
    assert float(encoder.fc.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert encoder.fc.bias.tolist() == [0.0] * 60


def test_one_region_in_training_takes_the_running_statistics() -> None:
    encoder = make(False)
    encoder(torch.randn(4, 5, 10))
    before = encoder.mlp[1].running_mean.clone()
    single = torch.randn(1, 1, 10)
    in_training = encoder(single).values
    assert torch.equal(encoder.mlp[1].running_mean, before)
    assert torch.equal(in_training, encoder.eval()(single).values)
    empty = encoder.train()(torch.zeros(3, 0, 10))
    assert (empty.values.shape, empty.offsets.tolist()) == ((0, 12), [0, 0, 0, 0])


@pytest.mark.parametrize("name", ["scan", "vsepp"])
@pytest.mark.parametrize(("kind", "projected"), [("residual", False), ("projected_residual", True)])
def test_every_model_takes_it(name: str, kind: str, projected: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
    model = models.create(name, **sizes, image_encoder=kind).eval()
    assert model.image_encoder.projected is projected
    features = torch.randn(3, 5, 10)
    regions = model.image_encoder(features).values.reshape(3, 5, 12)
    encoded = model.encode_images(features)
    if name == "vsepp":
        means = regions.mean(1)
        torch.testing.assert_close(encoded, means / means.norm(dim=1, keepdim=True))
    else:
        norms = encoded.values.norm(dim=1)
        torch.testing.assert_close(encoded.values.reshape(3, 5, 12), regions)
        torch.testing.assert_close(norms, torch.ones(15))
