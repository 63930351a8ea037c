"""InfoNCE and SigLIP against loops over floats, their learned parameters, and training with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from itm_fast import losses
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.runs import config, make_trainer, run


def infonce(scores: list[list[float]], left_out: list[list[bool]], scale: float) -> list[list[float]]:
    """Return the losses of the rows' and of the columns' anchors."""
    n, sides = len(scores), []
    for s, mask in ((scores, left_out), ([*zip(*scores, strict=True)], [*zip(*left_out, strict=True)])):
        sums = [sum(math.exp(scale * s[i][j]) for j in range(n) if j == i or not mask[i][j]) for i in range(n)]
        sides.append([-math.log(math.exp(scale * s[i][i]) / sums[i]) for i in range(n)])
    return sides


def siglip(scores: list[list[float]], left_out: list[list[bool]], scale: float, bias: float) -> list[float]:
    """Return the losses of the images."""
    each = []
    for i, row in enumerate(scores):
        terms = [(1 if i == j else -1) * (scale * s + bias) for j, s in enumerate(row) if i == j or not left_out[i][j]]
        each.append(sum(-math.log(1 / (1 + math.exp(-term))) for term in terms))
    return each


def random_case(n: int, *, masked: bool = True) -> tuple[Tensor, Tensor | None, list[list[bool]]]:
    draw = torch.Generator().manual_seed(n)
    scores = torch.randn(n, n, generator=draw, dtype=torch.float64).tanh()
    positives = torch.rand(n, n, generator=draw) < 0.3
    return scores, positives if masked else None, (positives & torch.tensor(masked)).tolist()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_values_are_those_of_the_published_formulas(n: int, masked: bool) -> None:
    scores, positives, left_out = random_case(n, masked=masked)
    loss = losses.InfoNCELoss(initial_scale=3.0, reduction="none").double()
    exact = torch.tensor(infonce(scores.tolist(), left_out, math.exp(loss.log_scale.item())), dtype=torch.float64)
    torch.testing.assert_close(loss(scores, positives=positives).detach(), exact, rtol=1e-12, atol=1e-13)
    other = losses.SigLIPLoss(initial_scale=4.0, initial_bias=-2.0, reduction="none").double()
    wanted = siglip(scores.tolist(), left_out, math.exp(other.log_scale.item()), other.bias.item())
    torch.testing.assert_close(
        other(scores, positives=positives).detach(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-13
    )


def test_reductions_and_directions() -> None:
    scores, positives, _ = random_case(5)
    each = losses.InfoNCELoss(reduction="none")(scores, positives=positives).detach()
    for directions, wanted in (("both", each), ("rows", each[0]), ("columns", each[1])):
        for reduction, expected in (("sum", wanted.sum()), ("mean", wanted.sum() / 5), ("none", wanted)):
            found = losses.InfoNCELoss(directions=directions, reduction=reduction)(scores, positives=positives)
            torch.testing.assert_close(found.detach(), expected)
    halved = losses.InfoNCELoss(halve=True, reduction="mean")(scores, positives=positives)
    assert halved.item() == pytest.approx(each.sum().item() / 10, rel=1e-12)
    each = losses.SigLIPLoss(reduction="none")(scores, positives=positives).detach()
    assert each.shape == (5,)
    for reduction, expected in (("sum", each.sum()), ("mean", each.sum() / 5)):
        torch.testing.assert_close(
            losses.SigLIPLoss(reduction=reduction)(scores, positives=positives).detach(), expected
        )


def test_without_a_positive_pair_beside_the_diagonal_cross_entropy_is_that_of_torch() -> None:
    """CLIP averages the cross-entropy of the rows and of the columns."""
    scores = torch.randn(6, 6, dtype=torch.float64).tanh()
    loss = losses.InfoNCELoss(halve=True, reduction="mean").double()
    logits, target = loss.log_scale.exp() * scores, torch.arange(6)
    expected = [torch.nn.functional.cross_entropy(side, target) for side in (logits, logits.t())]
    torch.testing.assert_close(loss(scores), (expected[0] + expected[1]) / 2)


@pytest.mark.parametrize("make", [losses.InfoNCELoss, losses.SigLIPLoss])
def test_gradients(make: type) -> None:
    """Of the scores and of the learned parameters."""
    scores, positives, _ = random_case(5)
    loss = make(initial_scale=3.0).double()
    names = [name for name, _ in loss.named_parameters()]

    def value(given: Tensor, *learned: Tensor) -> Tensor:
        return torch.func.functional_call(loss, dict(zip(names, learned, strict=True)), given, {"positives": positives})

    learned = [one.detach().clone().requires_grad_() for one in loss.parameters()]
    assert torch.autograd.gradcheck(value, (scores.requires_grad_(), *learned))
    # Pairs that are left out have no gradient.
    loss(scores, positives=positives).backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad != 0, ~(positives & ~torch.eye(5, dtype=torch.bool)))


def test_the_scale_starts_as_published_and_stays_at_most_100() -> None:
    loss = losses.InfoNCELoss()
    assert loss.log_scale.exp().item() == pytest.approx(1 / 0.07, rel=1e-6)
    with torch.no_grad():
        loss.log_scale.fill_(6.0)
    loss(torch.eye(3)).backward()
    assert loss.log_scale.exp().item() == pytest.approx(100, rel=1e-6)
    assert loss.log_scale.grad is not None
    other = losses.SigLIPLoss()
    assert (other.log_scale.exp().item(), other.bias.item()) == pytest.approx((10, -10), rel=1e-6)


@pytest.mark.parametrize("make", [losses.InfoNCELoss, losses.SigLIPLoss])
def test_large_scores_and_empty_batches_are_finite(make: type) -> None:
    for scores in (torch.full((3, 3), 300.0), torch.full((3, 3), -300.0), torch.zeros(0, 0)):
        loss = make(reduction="mean")(scores.requires_grad_())
        assert torch.isfinite(loss)
        loss.backward()
        assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (losses.InfoNCELoss, {"initial_scale": 0.0}, r"^initial_scale: expected a number other than 0, got 0\.0$"),
        (losses.InfoNCELoss, {"initial_scale": 101}, r"^initial_scale: expected a number of at most 100, got 101\.0$"),
        (losses.InfoNCELoss, {"reduction": "max"}, r"^reduction: "),
        (losses.SigLIPLoss, {"initial_bias": math.nan}, r"^initial_bias: expected a finite number, got nan$"),
        (losses.SigLIPLoss, {"reduction": "max"}, r"^reduction: "),
    ],
)
def test_bad_settings(make: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("loss", "learned"),
    [("infonce", {"log_scale": math.log(1 / 0.07)}), ("siglip", {"log_scale": math.log(10), "bias": -10.0})],
)
def test_a_training_learns_and_logs_the_parameters_without_weight_decay(
    data: Path, tmp_path: Path, loss: str, learned: dict[str, float]
) -> None:
    settings = config(
        data, tmp_path / "run", loss=loss, mining="all", mean_loss=True, optimizer="adamw", weight_decay=0.1, epochs=6
    )
    result = run(settings)
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert result.steps == 24
    for name, start in learned.items():
        values = [line[f"loss_{name}"] for line in lines]
        assert values[0] == pytest.approx(start, abs=3 * settings.lr)
        assert len(set(values)) == len(values)
    groups = make_trainer(settings).stepper.scenario.target.optimizer.param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups[1:]] == [(len(learned), 0.0)]


def test_several_branches_cannot_share_a_learned_scale(data: Path, tmp_path: Path) -> None:
    message = r"^loss: infonce learns parameters, which several branches \(--scenario oss\) cannot share$"
    with pytest.raises(ValueError, match=message):
        make_trainer(config(data, tmp_path / "run", loss="infonce", mining="all", scenario="oss"))
