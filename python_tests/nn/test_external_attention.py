"""ESA's pooling against float64 loops over one channel at a time."""

from __future__ import annotations

import pytest
import torch

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import ExternalSpacePooling


@pytest.mark.parametrize("lengths", [[3, 3], [4, 1, 2]])
def test_values_and_gradients_equal_the_definition(lengths: list[int]) -> None:
    torch.manual_seed(0)
    pool = ExternalSpacePooling(5).double()
    with torch.no_grad():
        pool.linear.bias.normal_()
    sets = [torch.randn(length, 5, dtype=torch.float64, requires_grad=True) for length in lengths]
    expected = []
    for rows in sets:
        logits = [pool.linear.weight @ row + pool.linear.bias for row in rows]
        channels = []
        for channel in range(5):
            powers = [logit[channel].exp() for logit in logits]
            channels.append(sum(p / sum(powers) * row[channel] for p, row in zip(powers, rows, strict=True)))
        expected.append(torch.stack(channels))
    found, wanted = pool(Fragments.from_list(sets)), torch.stack(expected)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    leaves = [*pool.parameters(), *sets]
    grads = [torch.autograd.grad((values * weight).sum(), leaves, retain_graph=True) for values in (found, wanted)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    single = pool.float()(Fragments.from_list(sets).detach().to(torch.float32))
    torch.testing.assert_close(single.double(), wanted, rtol=0, atol=1e-6)


def test_an_empty_set_is_zero_and_gets_no_gradient() -> None:
    pool = ExternalSpacePooling(5)
    rows = torch.randn(3, 5, requires_grad=True)
    found = pool(Fragments(rows, torch.tensor([0, 0, 3, 3])))
    assert (found[0].tolist(), found[2].tolist()) == ([0.0] * 5, [0.0] * 5)
    found.sum().backward()
    assert all(bool(leaf.grad.isfinite().all()) for leaf in (rows, *pool.parameters()))
    assert pool(Fragments(torch.zeros(0, 5), torch.tensor([0, 0]))).tolist() == [[0.0] * 5]


def test_feature_conversions_refuse_a_host_with_this_pooling() -> None:
    sizes = {"vocab_size": 9, "feature_dim": 6, "embed_dim": 8, "word_dim": 5}
    for name in ("image_pooling", "text_pooling"):
        with pytest.raises(ValueError, match=rf"{name}: expected mean or gpo with feature conversions, got esa$"):
            models.create("fdf", host="vse_infty", host_options={**sizes, name: "esa"}, conversions=2)
