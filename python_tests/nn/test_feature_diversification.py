"""The conversions, reweighting and fused feature of FDF against loops over the equations of the paper in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from itm_fast import Fragments, models
from itm_fast.nn import FeatureConversions, FeatureDiversification, ImageEncoder, PatchEncoder, ResidualImageEncoder
from itm_fast.nn.feature_diversification import CONVERSIONS
from python_tests.helpers import fdf

LENGTHS = [3, 1, 4]


def base(width: int, lengths: list[int] = LENGTHS, seed: int = 0) -> Fragments:
    generator = torch.Generator().manual_seed(seed)
    return Fragments.from_list([torch.randn(n, width, generator=generator, dtype=torch.float64) for n in lengths])


def shaken(module: nn.Module, seed: int = 1) -> nn.Module:
    """Convert a module to float64 and move all weights and statistics from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.double().state_dict().values():
            value.add_(0.3 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
    return module


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@pytest.mark.parametrize("conversion", ["ffn", "adapter"])
def test_conversions_tell_small_features_apart_from_the_start(conversion: str) -> None:
    """Conversions start with zero biases: for small inputs such as GRU states, random biases would make all rows alike.

    Rows that are orthogonal before a ReLU have a cosine of 1 / pi after it.
    """
    torch.manual_seed(0)
    conversions = FeatureConversions(2, 64, 64, head="identity", conversion=conversion)
    rows = 0.05 * torch.randn(200, 64)
    cosines = torch.nn.functional.normalize(conversions(Fragments.from_padded(rows[:, None])), dim=2)
    alike = cosines @ cosines.transpose(1, 2)
    assert float(alike.detach().abs().mean()) < 1 / math.pi + 0.1
    assert not any(bool(layer.bias.detach().any()) for layer in conversions.network)


@pytest.mark.parametrize("pooling", [None, "mean", "gpo"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("head", ["identity", "linear", "residual", "projected_residual", "mlp"])
def test_conversions_and_the_fused_feature_equal_the_equations(head: str, conversion: str, pooling: str | None) -> None:
    """Values and the gradients of all weights and of the base features equal those of the equations."""
    dims = (8, 8) if head == "identity" else (5, 8)
    side = shaken(
        FeatureDiversification(
            2, *dims, head=head, conversion=conversion, pooling=pooling, residual=conversion == "ffn" and head == "mlp",
            attention=head in ("identity", "linear"), reweighting=head != "mlp", normalize_fused=head != "residual",
        )
    )  # fmt: skip
    sets = base(dims[0])
    values = sets.values.clone().requires_grad_()
    actual = side(sets.with_values(values))
    rows = actual if pooling else actual.values
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = fdf.fused(side, values.split(LENGTHS))
    exact_rows = torch.stack(exact) if pooling else torch.cat(exact)
    torch.testing.assert_close(rows, exact_rows, rtol=1e-10, atol=1e-12)
    leaves = [values, *side.parameters()]
    for found, wanted in zip(
        gradients((rows * weight).sum(), *leaves), gradients((exact_rows * weight).sum(), *leaves), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_each_conversion_has_the_attention_of_chan_over_regions() -> None:
    torch.manual_seed(0)
    options = {"vocab_size": 9, "feature_dim": 5, "embed_dim": 8, "word_dim": 4, "region_attention": True}
    model = shaken(models.create("fdf", host="chan", host_options=options, conversions=2)).eval()
    assert not any(name.startswith("host.region_attention") for name in model.state_dict())
    sets = base(5)
    expected = torch.cat(fdf.fused(model.images, sets.values.split(LENGTHS)))
    torch.testing.assert_close(model.encode_images(sets).values, expected, rtol=1e-10, atol=1e-12)


def test_weights_start_with_the_mean() -> None:
    side = FeatureDiversification(3, 5, 4).double()
    sets = base(5)
    mean = side.conversions(sets).mean(0)
    expected = mean / (mean.norm(dim=1, keepdim=True) + 1e-8)
    torch.testing.assert_close(side(sets).values, expected, rtol=1e-12, atol=1e-14)
    assert float(side.reweighting(sets).detach().sub(1 / 3).abs().max()) < 1e-15


def products(conversions: FeatureConversions, sets: Fragments) -> dict[str, int]:
    """Count each kind of matrix product in a forward and a backward."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        conversions(sets).square().sum().backward()
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    return {event.key: event.count for event in found.key_averages() if event.key in names}


@pytest.mark.parametrize("head", ["identity", "linear", "residual"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_eight_conversions_take_the_products_of_one(head: str, conversion: str) -> None:
    sets = Fragments.from_padded(torch.randn(4, 8, 16))
    counts = [products(FeatureConversions(n, 16, 16, head=head, conversion=conversion), sets) for n in (1, 8)]
    assert counts[0] == counts[1]
    assert 0 < sum(counts[0].values()) <= 21


def test_heads_start_and_compute_as_those_of_the_hosts() -> None:
    """One conversion of the form "none" equals the image encoder of the host. Each conversion has its own initial
    weights.
    """
    torch.manual_seed(0)
    conversions = FeatureConversions(3, 5, 8, head="linear", conversion="none")
    bound = (6 / 13) ** 0.5
    assert float(conversions.fc.weight.detach().abs().max()) <= bound
    assert float(conversions.fc.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.15)
    assert bool((conversions.fc.bias == 0).all())
    features = base(5).to(torch.float32)
    for n in range(3):
        encoder = ImageEncoder(5, 8)
        encoder.fc.weight.data, encoder.fc.bias.data = conversions.fc.weight[n].data, conversions.fc.bias[n].data
        torch.testing.assert_close(conversions(features)[n], encoder(features).values)

    conversions = FeatureConversions(2, 5, 8, head="residual", conversion="none")
    encoders = []
    for n in range(2):
        encoder = ResidualImageEncoder(5, 8)
        layers = (
            (encoder.fc, conversions.fc),
            (encoder.mlp[0], conversions.mlp[0]),
            (encoder.mlp[3], conversions.mlp[2]),
        )
        for own, grouped in layers:
            own.weight.data, own.bias.data = grouped.weight[n].data, grouped.bias[n].data
        encoders.append(encoder)
    for mode in (True, False):
        rows = conversions.train(mode)(features)
        for n, encoder in enumerate(encoders):
            torch.testing.assert_close(rows[n], encoder.train(mode)(features).values)
            norm = encoder.mlp[1]
            torch.testing.assert_close(conversions.mlp[1].running_mean[n], norm.running_mean)
            torch.testing.assert_close(conversions.mlp[1].running_var[n], norm.running_var)


@pytest.mark.parametrize(("pooling", "attention"), [(None, False), (None, True), ("gpo", False)])
def test_conversions_of_another_batch_are_differentiated_where_the_loss_looks(
    pooling: str | None, attention: bool
) -> None:
    """The gradient equals that of converting all sets. Only sets with a gradient are converted again, and the running
    statistics do not change.
    """
    torch.manual_seed(0)
    conversions = shaken(FeatureConversions(3, 5, 8, head="residual", pooling=pooling, attention=attention))
    lengths = [2, 4, 1, 3, 2]
    sets = base(5, lengths)
    statistics = copy.deepcopy(dict(conversions.named_buffers()))
    (rows,) = conversions.of_others([sets])
    exact = fdf.converted(conversions, sets.values.split(lengths), 1, running=True)
    exact_rows = torch.stack(exact) if pooling else torch.cat(exact)
    torch.testing.assert_close(rows, exact_rows, rtol=1e-10, atol=1e-12)

    weight = torch.zeros_like(rows)
    chosen = [1, 4]
    for index in chosen:
        own = slice(index, index + 1) if pooling else slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        weight[own] = torch.randn(weight[own].shape, generator=torch.Generator().manual_seed(index), dtype=weight.dtype)
    converted = []
    handle = conversions.register_forward_pre_hook(lambda _, arguments: converted.append(arguments[0].lengths.tolist()))
    found = gradients((rows * weight).sum(), *conversions.parameters())
    handle.remove()
    assert converted == [[lengths[index] for index in chosen]]
    for actual, wanted in zip(found, gradients((exact_rows * weight).sum(), *conversions.parameters()), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-10)
        if actual.shape[0] == 3:
            assert bool((actual[[0, 2]] == 0).all()), "of conversion 1 alone"
    for name, buffer in conversions.named_buffers():
        assert torch.equal(buffer, statistics[name])


@pytest.mark.parametrize(("pooling", "attention"), [(None, False), (None, True), ("gpo", False)])
def test_each_of_several_batches_has_a_conversion_of_its_own(pooling: str | None, attention: bool) -> None:
    """Values equal those of the separate conversions. The gradients of the batches add up."""
    torch.manual_seed(0)
    conversions = shaken(FeatureConversions(4, 5, 8, head="residual", pooling=pooling, attention=attention)).eval()
    others = [base(5, [2, 3], seed=7), base(5, [1, 4, 2], seed=8)]
    expected = [conversions(sets)[number] for number, sets in enumerate(others, start=2)]
    found = conversions.of_others(others, 2)
    weights = [torch.randn(rows.shape, dtype=rows.dtype) for rows in expected]
    losses = [
        sum((rows * weight).sum() for rows, weight in zip(side, weights, strict=True)) for side in (found, expected)
    ]
    for rows, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, wanted, rtol=1e-12, atol=1e-14)
    parameters = list(conversions.parameters())
    for actual, wanted in zip(gradients(losses[0], *parameters), gradients(losses[1], *parameters), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
    assert conversions.of_others([]) == []


@pytest.mark.parametrize(("first", "most"), [(1, 2), (2, 1)])
def test_more_batches_than_conversions_are_named(first: int, most: int) -> None:
    sets = base(5).to(torch.float32)
    with pytest.raises(
        ValueError,
        match=f"^others: expected at most {most} of them for the conversions from {first} on, got 3$",
    ):
        FeatureConversions(3, 5, 6).of_others([sets] * 3, first)


def test_no_gradient_converts_nothing_again() -> None:
    conversions = FeatureConversions(2, 5, 6)
    (rows,) = conversions.of_others([base(5).to(torch.float32)], 0)
    calls = []
    conversions.register_forward_pre_hook(lambda *_: calls.append(1))
    (rows * 0).sum().backward()
    assert calls == []
    assert all(bool((parameter.grad == 0).all()) for parameter in conversions.parameters()), "as of plain PyTorch"


def test_a_second_derivative_is_refused() -> None:
    conversions = FeatureConversions(2, 5, 6)
    (rows,) = conversions.of_others([base(5).to(torch.float32)], 0)
    (gradient,) = torch.autograd.grad(rows.square().sum(), [conversions.fc.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="gradient_sparse_sets does not support second derivatives"):
        gradient.sum().backward()


def test_the_last_convolution_over_patches_is_linear_over_neighbourhoods() -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder(48, 6).eval()
    features = torch.randn(2, 9, 48)
    below = encoder.neighbourhoods(features)
    assert below.values.shape == (18, encoder.neighbourhood_dim)
    conversions = FeatureConversions(1, encoder.neighbourhood_dim, 6, conversion="none")
    last = encoder.layers[-1]
    conversions.fc.weight.data, conversions.fc.bias.data = last.weight.data.flatten(1)[None], last.bias.data[None]
    torch.testing.assert_close(conversions(below)[0], encoder(features).values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count: expected a whole number of at least 1, got 0"),
        ({"head": "conv"}, "head: expected one of identity, linear, residual, projected_residual, mlp, got 'conv'"),
        ({"conversion": "mlp"}, "conversion: expected one of ffn, adapter, none, got 'mlp'"),
        ({"pooling": "max"}, "pooling: expected one of None, mean, gpo, got 'max'"),
        ({"head": "identity"}, "feature_dim: expected embed_dim, 6, without a head, got 5"),
        ({"conversion": "none", "residual": True}, "residual: belongs to the conversion ffn, not none"),
    ],
)
def test_bad_settings_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureConversions(**{"count": 2, "feature_dim": 5, "embed_dim": 6, **options})


def test_features_of_another_width_are_named() -> None:
    with pytest.raises(ValueError, match="base: expected rows of width 5, got 4"):
        FeatureConversions(2, 5, 6)(base(4))
