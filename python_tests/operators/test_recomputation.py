"""Activation checkpointing: an operator is computed again in the backward pass, which reads saved tensors once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.nn import RegulatedSimilarity

LENGTHS = torch.tensor([3, 6, 1, 4])


def sets(padded: Tensor) -> Fragments:
    return Fragments.from_padded(padded, LENGTHS)


def regulated(words: Tensor, regions: Tensor) -> Tensor:
    torch.manual_seed(0)
    similarity = RegulatedSimilarity(16, 8, correspondence_steps=1, aggregation_steps=2).eval()
    return similarity(sets(words), sets(regions)).sum()


def domains(words: Tensor, regions: Tensor) -> Tensor:
    weights, biases = torch.linspace(-1, 1, 64).view(4, 16), torch.zeros(4)
    risks = F_itm.domain_regularization(sets(regions), sets(words), weights, biases)
    return torch.stack([risk.sum() for risk in risks]).sum()


def square(words: Tensor, regions: Tensor) -> Tensor:
    return words[:, 0] @ regions[:, 0].t()


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_attention_scores": lambda w, r: F_itm.cross_attention_scores(sets(w), sets(r)).square().sum(),
    "maxsim_scores": lambda w, r: F_itm.maxsim_scores(sets(w), sets(r)).square().sum(),
    "matching_loss": lambda w, r: F_itm.matching_loss(sets(w), sets(r))[0],
    "boosting_in_matching_loss": lambda w, r: F_itm.matching_loss(
        sets(w), sets(r), loss="boosting", anchor_scores=torch.zeros(4, 4)
    )[0],
    "triplet_loss": lambda w, r: F_itm.triplet_loss(square(w, r)),
    "triplet_loss_of_anchors": lambda w, r: F_itm.triplet_loss(square(w, r), reduction="none").square().sum(),
    "boosting_loss": lambda w, r: F_itm.boosting_loss(square(w, r), torch.zeros(4, 4)),
    "hardest_negatives": lambda w, r: sum(values.sum() for values, _ in F_itm.hardest_negatives(square(w, r))),
    "regulated_scores": regulated,
    "domain_regularization": domains,
}


def gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], *, again: bool) -> tuple[Tensor, ...]:
    found = checkpoint(call, *inputs, use_reentrant=False) if again else call(*inputs)
    return torch.autograd.grad(found, inputs)


@pytest.mark.parametrize("name", CALLS)
def test_a_recomputed_operator_has_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 6, 16, requires_grad=True) for _ in range(2)]
    plain, again = (gradients(CALLS[name], inputs, again=again) for again in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert any(float(one.abs().max()) > 0 for one in plain)


@pytest.mark.parametrize("regulator", [None, "rcar"])
def test_a_recomputed_model_has_the_same_gradients(regulator: str | None) -> None:
    torch.manual_seed(0)
    options = {} if regulator is None else {"regulator": regulator, "alignment_dim": 8}
    model = models.create("scan", vocab_size=30, feature_dim=12, embed_dim=16, word_dim=8, **options).eval()
    regions, tokens = torch.randn(4, 5, 12), torch.randint(30, (4, 6))
    results = []
    for again in (False, True):
        model.zero_grad()
        call = lambda rows: model(rows, tokens, LENGTHS).square().sum()  # noqa: E731
        (checkpoint(call, regions, use_reentrant=False) if again else call(regions)).backward()
        results.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
