"""Generalized pooling against its definition in float64, its gradients, and when its weights are recomputed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.nn import GeneralizedPooling
from python_tests.helpers.pooling import pooled, pooling_weights

LENGTHS = [3, 1, 7, 3, 12]


@pytest.fixture
def pool() -> GeneralizedPooling:
    torch.manual_seed(0)
    module = GeneralizedPooling(8, 6)
    with torch.no_grad():
        module.linear.weight.mul_(3)  # Makes the weights far from equal.
    return module


def rows(d: int = 5) -> Tensor:
    return torch.randn(sum(LENGTHS), d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ragged(values: Tensor) -> Fragments:
    return Fragments.from_list(list(values.split(LENGTHS)))


def definition(pool: GeneralizedPooling, values: Tensor) -> Tensor:
    return torch.stack([pooled(pool, one) for one in values.split(LENGTHS)])


@pytest.fixture
def runs(pool: GeneralizedPooling) -> Iterator[list[int]]:
    """Record the number of sequences in every run of the GRU."""
    counted: list[int] = []
    handle = pool.gru.register_forward_hook(
        lambda _module, inputs, _output: counted.append(int(inputs[0].batch_sizes[0]))
    )
    yield counted
    handle.remove()


def test_pools_by_the_definition(pool: GeneralizedPooling) -> None:
    values = rows()
    expected = definition(copy.deepcopy(pool).double(), values)
    torch.testing.assert_close(copy.deepcopy(pool).double()(ragged(values)), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        low = pool(ragged(values.float()))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), expected.detach(), rtol=0, atol=2e-6)
    weights = pool.weights([12])[0].detach()
    assert float(weights.max() - weights.min()) > 0.02, "weights that tell this from a mean"
    torch.testing.assert_close(low[1].double(), values[3], rtol=0, atol=1e-6, msg="a set of one is that row")


def test_weights_by_length(pool: GeneralizedPooling) -> None:
    pool = pool.double()
    lengths = [4, 1, 9, 4, 36, 150]
    weights = pool.weights(lengths)
    assert weights.shape == (6, 150)
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))
    for row, length in zip(weights, lengths, strict=True):
        torch.testing.assert_close(row[:length], pooling_weights(pool, length), rtol=1e-11, atol=1e-14)
        assert row[length:].abs().sum() == 0
    with torch.no_grad():
        torch.testing.assert_close(pool.weights(lengths), weights, rtol=0, atol=1e-15)


def test_equal_weights_are_the_mean(pool: GeneralizedPooling) -> None:
    torch.nn.init.zeros_(pool.linear.weight)
    values = rows()
    expected = torch.stack([one.mean(0) for one in values.split(LENGTHS)])
    torch.testing.assert_close(pool(ragged(values.float())).double(), expected, rtol=0, atol=1e-6)


def test_padded_sets_are_the_same_sets(pool: GeneralizedPooling) -> None:
    values = rows().float()
    padded, lengths = ragged(values).to_padded(fill=1e30)
    assert torch.equal(pool(padded, lengths), pool(ragged(values)))
    assert torch.equal(pool(padded, lengths.to(torch.int32)), pool(ragged(values)))
    full = torch.randn(4, 6, 5)
    assert torch.equal(pool(full), pool(Fragments.from_padded(full)))
    torch.testing.assert_close(pool(full)[2:3], pool(full[2:3]))
    assert pool(torch.zeros(0, 3, 5)).shape == (0, 5)


def test_the_order_of_the_members_does_not_matter(pool: GeneralizedPooling) -> None:
    full = torch.randn(4, 6, 5)
    assert torch.equal(pool(full[:, torch.randperm(6)]), pool(full))


def test_equal_members_share_their_weights(pool: GeneralizedPooling) -> None:
    """Equal values share their places in the order: each gets the weight of one of these places, in any order."""
    full = torch.tensor([3.0, 1.0, 3.0, 1.0, 1.0])[None, :, None].requires_grad_()
    (gradient,) = torch.autograd.grad(pool(full).sum(), full)
    weights = pool.weights([5])[0].detach()
    torch.testing.assert_close(gradient[0, [0, 2], 0].sort().values, weights[:2].sort().values)
    torch.testing.assert_close(gradient[0, [1, 3, 4], 0].sort().values, weights[2:].sort().values)


def test_gradients_equal_those_of_the_definition(pool: GeneralizedPooling) -> None:
    pool = pool.double()
    values, incoming = rows().requires_grad_(), torch.randn(len(LENGTHS), 5, dtype=torch.float64)
    wanted = torch.autograd.grad((definition(pool, values) * incoming).sum(), [values, *pool.parameters()])
    found = torch.autograd.grad((pool(ragged(values)) * incoming).sum(), [values, *pool.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert float(one.abs().max()) > 1e-4


def test_gradcheck() -> None:
    torch.manual_seed(0)
    pool = GeneralizedPooling(4, 3).double()
    values = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)

    def apply(values: Tensor, *parameters: Tensor) -> Tensor:
        sets = Fragments(values, torch.tensor([0, 1, 4, 9]))
        names = [name for name, _ in pool.named_parameters()]
        return torch.func.functional_call(pool, dict(zip(names, parameters, strict=True)), (sets,))

    assert torch.autograd.gradcheck(apply, (values, *pool.parameters()))


def test_weights_are_computed_once_for_each_length(pool: GeneralizedPooling, runs: list[int]) -> None:
    pool.eval()
    values = rows().float()
    with torch.no_grad():
        first = pool(ragged(values))
        assert runs == [1] * 4, (
            "each of the lengths 1, 3, 7 and 12 alone, so that it rounds the same whoever asks first"
        )
        assert torch.equal(pool(ragged(values)), first)
        assert runs == [1] * 4
        pool(torch.zeros(2, 5, 5))
        assert runs == [1] * 5, "the length that was missing"
        assert torch.equal(pool(ragged(values)), first)
    assert runs == [1] * 5
    pool(ragged(values))
    pool(ragged(values))
    assert runs == [1] * 5 + [4, 4], "a gradient recomputes them"
    for parameter in pool.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(pool(ragged(values)), first)
    assert runs == [1] * 5 + [4, 4], "but not that of frozen weights"
    pool.train()
    pool(ragged(values))
    assert runs == [1] * 5 + [4, 4, 4], "training depends on nothing that was kept"


def adam(pool: GeneralizedPooling) -> None:
    optimizer = torch.optim.Adam(pool.parameters(), lr=0.1, fused=True)
    pool(torch.randn(2, 3, 4)).square().sum().backward()
    optimizer.step()


def ema(pool: GeneralizedPooling) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(pool.parameters()), [torch.ones_like(one) for one in pool.parameters()], 0.5)


def loaded(pool: GeneralizedPooling) -> None:
    torch.manual_seed(5)
    pool.load_state_dict(GeneralizedPooling(8, 6).state_dict())


def through_data(pool: GeneralizedPooling) -> None:
    pool.gru.weight_hh_l0.data.mul_(2)


def other_place(pool: GeneralizedPooling) -> None:
    pool.linear.weight = torch.nn.Parameter(pool.linear.weight.detach() * 2)


def other_temperature(pool: GeneralizedPooling) -> None:
    pool.temperature = 0.3


@pytest.mark.parametrize("change", [adam, ema, loaded, through_data, other_place, other_temperature])
def test_a_change_drops_the_kept_weights(pool: GeneralizedPooling, change: object) -> None:
    pool.eval()
    values = ragged(rows().float())
    with torch.no_grad():
        before = pool(values)
    change(pool)
    fresh = GeneralizedPooling(8, 6, pool.temperature)
    fresh.load_state_dict(pool.state_dict())
    with torch.no_grad():
        after = pool(values)
        assert torch.equal(after, fresh.eval()(values))
    assert float((after - before).abs().max()) > 1e-3


def test_other_dtypes(pool: GeneralizedPooling) -> None:
    values = rows().float()
    with torch.no_grad():
        wanted = pool(ragged(values))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pool(ragged(values)), wanted), "float32 under autocast, too"
        low = pool(ragged(values.bfloat16()))
        assert low.dtype == torch.float32
        assert torch.equal(low, pool(ragged(values.bfloat16().float()))), "summed in float32"
        assert pool.double()(ragged(rows())).dtype == torch.float64
        torch.testing.assert_close(pool(ragged(values.double())), wanted.double(), rtol=0, atol=1e-5)


def test_inference_mode_before_training(pool: GeneralizedPooling) -> None:
    values = ragged(rows().float())
    with torch.inference_mode():
        first = pool(values)
        made_there = GeneralizedPooling(8, 6)
        made_there.load_state_dict(pool.state_dict())
        assert torch.equal(made_there(values), first)
    for parameter in pool.parameters():
        parameter.requires_grad_(False)
    leaf = values.values.clone().requires_grad_()
    pool(values.with_values(leaf)).sum().backward()
    torch.testing.assert_close(leaf.grad.sum(), torch.tensor(25.0))
    assert torch.equal(pool(values), first)


def test_values_that_are_not_finite_show(pool: GeneralizedPooling) -> None:
    full = torch.zeros(2, 3, 2)
    full[0, 1, 1] = torch.nan
    assert pool(full).isnan().tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 0, 4),), "features: expected at least one row in each set, set 0 has none"),
        ((torch.zeros(3, 2, 4), torch.tensor([1, 2, 0])), "features: expected at least one row in each set, set 2"),
        ((torch.zeros(3, 4),), r"features: expected Fragments or a floating point tensor \(n_sets, max_len, d\), got "
         r"torch.float32 of shape \(3, 4\)"),
        (([1.0],), "got <class 'list'>"),
        ((torch.zeros(3, 2, 4, dtype=torch.int64),), "got torch.int64 of shape"),
        ((torch.zeros(3, 2, 4), torch.tensor([1, 2, 3])), "lengths: expected values from 0 to 2, got 1 to 3"),
        ((Fragments(torch.zeros(2, 1), torch.tensor([0, 2])), torch.tensor([2])), "lengths: Fragments have their own"),
    ],
)  # fmt: skip
def test_bad_input(pool: GeneralizedPooling, arguments: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pool(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_dim": 7}, "position_dim: expected an even number of at least 2, got 7"),
        ({"hidden_dim": 0}, "hidden_dim: expected at least 1, got 0"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature: expected a finite number above 0, got nan"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeneralizedPooling(**settings)
