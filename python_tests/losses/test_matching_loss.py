"""The loss of a matching head: values of its formula, evenly drawn negatives, and training with it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from itm_fast import losses
from itm_fast.training.checkpoint import load_state
from python_tests.helpers.runs import config, differences, run, stop_at, what_a_run_leaves


def drawn(loss: losses.MatchingBCELoss, scores: Tensor, positives: Tensor | None = None) -> list[set[tuple[int, int]]]:
    """Return for each pair the places in the scores that its loss depends on."""
    scores = scores.clone().requires_grad_()
    each = loss(scores, positives=positives)
    grads = [torch.autograd.grad(one, scores, retain_graph=True)[0] for one in each]
    return [{(int(i), int(j)) for i, j in grad.nonzero()} for grad in grads]


@pytest.mark.parametrize("masked", [False, True])
def test_values_are_those_of_the_formula(masked: bool) -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positives = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.3 if masked else None
    loss, again = (losses.MatchingBCELoss(reduction="none") for _ in range(2))
    for _ in range(20):
        found = again(scores, positives=positives)
        for pair, places in enumerate(drawn(loss, scores, positives)):
            (negative,) = places - {(pair, pair)}
            assert (negative[0] == pair) != (negative[1] == pair), "one of the image or of the caption"
            assert positives is None or not positives[negative]
            wanted = math.log(1 + math.exp(-scores[pair, pair])) + math.log(1 + math.exp(scores[negative]))
            assert float(found[pair]) == pytest.approx(wanted, rel=1e-12)
    for reduction, divisor in (("sum", 1), ("mean", 6)):
        total = losses.MatchingBCELoss(reduction=reduction)(scores, positives=positives)
        first = losses.MatchingBCELoss(reduction="none")(scores, positives=positives).sum()
        halved = losses.MatchingBCELoss(reduction=reduction, halve=True)(scores, positives=positives)
        assert (float(total), float(halved)) == pytest.approx((float(first) / divisor, float(first) / divisor / 2))


def test_it_is_the_cross_entropy_of_two_classes() -> None:
    """The published form: both classes have a logit, and the mean is over matching and other pairs."""
    logits = torch.randn(5, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores = logits[..., 1] - logits[..., 0]
    places = drawn(losses.MatchingBCELoss(reduction="none"), scores)
    chosen = [(pair, pair) for pair in range(5)] + [(places[pair] - {(pair, pair)}).pop() for pair in range(5)]
    labels = torch.tensor([1] * 5 + [0] * 5)
    wanted = torch.nn.functional.cross_entropy(torch.stack([logits[place] for place in chosen]), labels)
    torch.testing.assert_close(losses.MatchingBCELoss(halve=True, reduction="mean")(scores), wanted)


def test_negatives_are_drawn_evenly() -> None:
    loss, scores = losses.MatchingBCELoss(reduction="none"), torch.zeros(4, 4)
    positives = torch.zeros(4, 4, dtype=torch.bool)
    positives[0, 1] = True
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(2000):
        leaf = scores.clone().requires_grad_()
        loss(leaf, positives=positives)[0].backward()
        counts.update((i, j) for i, j in leaf.grad.nonzero().tolist() if i != j)
    wanted = {(0, 2): 500, (0, 3): 500, (1, 0): 333, (2, 0): 333, (3, 0): 333}
    assert counts.keys() == wanted.keys()
    # The standard deviation of a count is at most 20.
    assert dict(counts) == pytest.approx(wanted, abs=80)


def test_pairs_without_a_negative() -> None:
    scores = torch.tensor([[0.0]], requires_grad=True)
    loss = losses.MatchingBCELoss()(scores)
    loss.backward()
    assert (loss.item(), scores.grad.item()) == pytest.approx((math.log(2), -0.5))
    every = torch.ones(3, 3, dtype=torch.bool)
    assert float(losses.MatchingBCELoss()(torch.zeros(3, 3), positives=every)) == pytest.approx(3 * math.log(2))
    assert float(losses.MatchingBCELoss()(torch.zeros(0, 0))) == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_refused(reentrant: bool) -> None:
    """It would compute the loss again with other negatives, and the gradient would not be that of the loss."""
    scores, loss = torch.zeros(6, 6, requires_grad=True), losses.MatchingBCELoss()
    found = checkpoint(loss, scores, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"MatchingBCELoss: .* call it outside of torch\.utils\.checkpoint$"):
        found.backward()
    assert int(loss.calls) == 1


def test_a_resumed_training_draws_the_same(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(data, tmp_path / "whole", loss="matching_bce", mining="all", halve_loss=True, mean_loss=True)
    assert run(settings).steps == 8
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert run(parts).steps == 3
    assert run(parts, resume=True).steps == 8
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    assert int(load_state(tmp_path / "whole")["loss"]["all.calls"]) == 8
