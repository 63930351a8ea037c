"""The residual image encoders against their formula in float64, and their batch normalisation on ragged regions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import ResidualImageEncoder

SETTINGS = {"residual": {}, "projected_residual": {"projected": True}, "mlp": {"projected": True, "residual": False}}
NORMS = pytest.mark.parametrize("norms", [1, 2])
KINDS = pytest.mark.parametrize("kind", SETTINGS)


def moments(encoder: ResidualImageEncoder, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden rows before the normalisation, their mean and their biased variance, in float64."""
    weights = {name: value.detach().double() for name, value in encoder.state_dict().items()}
    rows = rows.double()
    projected = rows @ weights["fc.weight"].T + weights["fc.bias"]
    hidden = (projected if encoder.projected else rows) @ weights["mlp.0.weight"].T + weights["mlp.0.bias"]
    return hidden, hidden.mean(0), (hidden - hidden.mean(0)).square().mean(0)


def moments_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(0), (rows - rows.mean(0)).square().mean(0)


def expected(
    encoder: ResidualImageEncoder,
    rows: Tensor,
    mean: Tensor,
    variance: Tensor,
    last: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """`last` returns mean and variance of the second normalisation, if there is one."""
    weights = {name: value.detach().double() for name, value in encoder.state_dict().items()}
    hidden = moments(encoder, rows)[0]
    normed = (hidden - mean) / (variance + 1e-5).sqrt() * weights["mlp.1.weight"] + weights["mlp.1.bias"]
    result = normed.clamp(min=0) @ weights["mlp.3.weight"].T + weights["mlp.3.bias"]
    if last is not None:
        mean, variance = last(result)
        result = (result - mean) / (variance + 1e-5).sqrt() * weights["mlp.4.weight"] + weights["mlp.4.bias"]
    if encoder.residual:
        result = result + rows.double() @ weights["fc.weight"].T + weights["fc.bias"]
    return result / result.square().sum(1, keepdim=True).sqrt()


def make(kind: str) -> ResidualImageEncoder:
    torch.manual_seed(0)
    encoder = ResidualImageEncoder(10, 12, **SETTINGS[kind])
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder


@KINDS
def test_values_in_training_and_evaluation(kind: str) -> None:
    encoder = make(kind)
    assert encoder.mlp[0].weight.shape == (6, 10 if kind == "residual" else 12)
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
def test_two_normalisations_as_the_paper_draws_them(kind: str) -> None:
    torch.manual_seed(1)
    encoder = ResidualImageEncoder(10, 12, **SETTINGS[kind], norms=2)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    features = torch.randn(4, 5, 10)
    rows = features.reshape(-1, 10)
    _, mean, variance = moments(encoder, rows)
    wanted = expected(encoder, rows, mean, variance, moments_of)
    torch.testing.assert_close(encoder(features).values.double(), wanted, rtol=1e-5, atol=2e-6)
    # The first training step moves the running statistics of both normalisations.
    kept = [(norm.running_mean.double(), norm.running_var.double()) for norm in (encoder.mlp[1], encoder.mlp[4])]
    assert all(not bool((mean == 0).all()) for mean, _ in kept)
    wanted = expected(encoder, rows, *kept[0], lambda _rows: kept[1])
    torch.testing.assert_close(encoder.eval()(features).values.double(), wanted, rtol=1e-5, atol=2e-6)


def test_a_number_of_normalisations_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="norms: expected 1 or 2, got 3"):
        ResidualImageEncoder(10, 12, norms=3)
    sizes = {"vocab_size": 9, "feature_dim": 10, "embed_dim": 12, "image_norms": 2}
    wanted = "image_norms: goes with the image_encoder residual or projected_residual or mlp, not linear"
    with pytest.raises(ValueError, match=wanted):
        models.create("vsepp", **sizes)
    host = {**sizes, "image_encoder": "residual"}
    with pytest.raises(ValueError, match="image_norms: expected 1 with feature conversions, got 2"):
        models.create("fdf", host="vse_infty", host_options=host, conversions=2)


@KINDS
def test_normalisation_sees_no_padding(kind: str) -> None:
    """Results, statistics and gradients do not depend on the padding."""
    lengths, ends = torch.tensor([3, 0, 5, 1]), [0, 3, 3, 8, 9]
    real = torch.randn(9, 10)
    results = []
    for padding in (0.0, 1e6):
        padded = torch.full((4, 5, 10), padding)
        for index, length in enumerate(lengths.tolist()):
            padded[index, :length] = real[ends[index] : ends[index + 1]]
        encoder = make(kind)
        regions = encoder(Fragments.from_padded(padded, lengths))
        regions.values.square().sum(1).log().sum().backward()
        regions.values.detach_()
        results.append((regions.values, encoder.mlp[1].running_mean, encoder.mlp[0].weight.grad))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    encoder = make(kind)
    _, mean, variance = moments(encoder, real)
    torch.testing.assert_close(results[0][0].double(), expected(encoder, real, mean, variance), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(results[0][1].double(), 0.1 * mean, rtol=1e-5, atol=1e-6)


@KINDS
def test_start_of_the_weights(kind: str) -> None:
    torch.manual_seed(0)
    encoder = ResidualImageEncoder(40, 60, **SETTINGS[kind])
    bound = math.sqrt(6 / 100)
    assert float(encoder.fc.weight.detach().abs().max()) <= bound
    assert float(encoder.fc.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert encoder.fc.bias.tolist() == [0.0] * 60


def test_one_region_in_training_takes_the_running_statistics() -> None:
    encoder = make("residual")
    encoder(torch.randn(4, 5, 10))
    before = encoder.mlp[1].running_mean.clone()
    single = torch.randn(1, 1, 10)
    in_training = encoder(single).values
    assert torch.equal(encoder.mlp[1].running_mean, before)
    assert torch.equal(in_training, encoder.eval()(single).values)
    empty = encoder.train()(torch.zeros(3, 0, 10))
    assert (empty.values.shape, empty.offsets.tolist()) == ((0, 12), [0, 0, 0, 0])


def test_a_linear_layer_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="residual: expected True where the perceptron sees the features"):
        ResidualImageEncoder(10, 12, residual=False)


@pytest.mark.parametrize("name", ["scan", "vsepp"])
@KINDS
@NORMS
def test_every_model_takes_it(name: str, kind: str, norms: int) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
    model = models.create(name, **sizes, image_encoder=kind, image_norms=norms).eval()
    built = model.image_encoder
    assert len(built.mlp) == 3 + norms
    assert (built.projected, built.residual) == (kind != "residual", kind != "mlp")
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
