"""Diagnostics of mining and gradients match loops, and measuring does not change training."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import mean_pool
from itm_fast.ops.triplet_loss import MINING
from itm_fast.report.curves import curves_svg
from itm_fast.training.diagnostics import embedding_diagnostics, image_gradient_norm, mining_diagnostics
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.runs import config, make_trainer, run, same, weights
from python_tests.helpers.triplet_cases import random_scores
from python_tests.helpers.triplets import loop_hardest

KEYS = {"i2t_hardest_share", "t2i_hardest_share", "hardest_gap", "score_spread"}


def by_loops(scores: Tensor, positives: Tensor | None, mining: str, epsilon: float) -> dict[str, float]:
    values, n = scores.double().tolist(), len(scores)
    result, gaps = {}, []
    for direction in ("i2t", "t2i"):
        taken = []
        for anchor in range(n):
            negatives = {}
            for other in range(n):
                i, j = (anchor, other) if direction == "i2t" else (other, anchor)
                if i != j and not (positives is not None and bool(positives[i, j])):
                    negatives[other] = values[i][j]
            if not negatives:
                continue
            own, hardest = values[anchor][anchor], loop_hardest(negatives)[0]
            gaps.append(abs(hardest - own))
            taken.append(
                {
                    "all": False,
                    "hardest": True,
                    "sct": True,
                    "semi_hard": hardest < own,
                    "selective": epsilon == 0 or abs(hardest - own) > epsilon,
                }[mining]
            )
        if taken:
            result[f"{direction}_hardest_share"] = sum(taken) / len(taken)
    each = [value for row in values for value in row]
    result["score_spread"] = statistics.stdev(each)
    return {**result, "hardest_gap": sum(gaps) / len(gaps)} if gaps else result


@pytest.mark.parametrize("mining", MINING)
def test_shares_and_distances_are_those_of_loops(mining: str) -> None:
    for n, masked, epsilon, dtype in (
        (2, False, 0.01, torch.float64),
        (9, False, 0.2, torch.float64),
        (9, True, 0.3, torch.float64),
        (33, True, 0.1, torch.float32),
        (9, False, 0.0, torch.bfloat16),
    ):
        scores = random_scores(n, dtype=dtype, seed=n)
        positives = random_scores(n, seed=n + 1) > 0.1 if masked else None
        measured = mining_diagnostics(scores, positives, mining, epsilon)
        assert measured == pytest.approx(by_loops(scores, positives, mining, epsilon), rel=1e-5)
        assert measured.keys() == KEYS


def test_an_example_by_hand() -> None:
    # Hardest of the rows 0.5, 0.75, 0.25: gaps to the positives 0.25, 0.25 and 0.125. Of the columns: 0.75, 0.25, 0.5.
    scores = torch.tensor([[0.75, 0.25, 0.5], [0.75, 0.5, 0.25], [0.25, 0.0, 0.375]])
    shares = {
        mining: mining_diagnostics(scores, None, mining, 0.125)
        for mining in ("hardest", "all", "selective", "semi_hard", "sct")
    }
    assert {measured["hardest_gap"] for measured in shares.values()} == {(0.25 + 0.25 + 0.125 + 0 + 0.25 + 0.125) / 6}
    directions = {
        mining: (measured["i2t_hardest_share"], measured["t2i_hardest_share"]) for mining, measured in shares.items()
    }
    assert directions == {
        "hardest": (1.0, 1.0),
        "all": (0.0, 0.0),
        "selective": (pytest.approx(2 / 3), pytest.approx(1 / 3)),
        "semi_hard": (pytest.approx(2 / 3), pytest.approx(1 / 3)),
        "sct": (1.0, 1.0),
    }


def test_where_there_is_nothing_to_measure_the_number_is_missing() -> None:
    assert mining_diagnostics(torch.ones(1, 1), None, "hardest", 0.01) == {}
    everywhere = torch.ones(3, 3, dtype=torch.bool)
    assert mining_diagnostics(torch.ones(3, 3), everywhere, "selective", 0.01) == {"score_spread": 0.0}
    # A row without a negative and a row with only infinitely distant negatives count in neither number.
    scores = torch.tensor([[0.5, 0.25], [-math.inf, 0.5]])
    assert mining_diagnostics(scores, torch.tensor([[False, True], [False, False]]), "hardest", 0.01) == {}
    assert mining_diagnostics(scores, None, "hardest", 0.01) == {
        "i2t_hardest_share": 1.0, "t2i_hardest_share": 1.0, "hardest_gap": 0.25,
    }  # fmt: skip


SIZES = {"vocab_size": 12, "feature_dim": 12, "embed_dim": 8, "word_dim": 6}


@pytest.mark.parametrize(
    ("name", "options", "weight"),
    [
        ("scan", {}, "image_encoder.fc.weight"),
        ("scan", {"regulator": "rcar", "image_encoder": "residual"}, "image_encoder.fc.weight"),
        ("bfan", {}, "image_encoder.fc.weight"),
        ("sgraf", {"n_regions": 4}, "image_encoder.fc.weight"),
        ("vsepp", {"image_encoder": "projected_residual"}, "image_encoder.fc.weight"),
        ("vse_infty", {}, "image_encoder.fc.weight"),
        ("rvsepp", {}, "image_encoder.fc.weight"),
        ("scan", {"image_encoder": "patches", "embed_dim": 16}, "image_encoder.layers.1.weight"),
    ],
)
def test_the_first_image_layer_of_a_model(name: str, options: dict[str, Any], weight: str) -> None:
    torch.manual_seed(0)
    model = models.create(name, **{**SIZES, **options})
    first = dict(model.named_parameters())[weight]
    assert model.first_image_weight() is first
    side = 12 if options.get("image_encoder") != "patches" else model.config.feature_dim
    scores = model(torch.rand(3, 4, side), torch.randint(4, 12, (3, 5)), torch.tensor([5, 3, 4]))
    with image_gradient_norm(model) as measured:
        assert measured == {}
        scores.square().sum().backward()
        norm = math.sqrt(float(first.grad.double().square().sum()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 10)
    assert norm > 0
    assert measured == {"image_grad_norm": pytest.approx(norm, rel=1e-5)}
    # No hook remains, and nothing is measured without a request or a gradient.
    assert not first._post_accumulate_grad_hooks
    for enabled in (False, True):
        with image_gradient_norm(model, enabled=enabled) as measured:
            model.text_encoder.embed.weight.sum().backward()
        assert measured == {}
    first.requires_grad_(False)
    with image_gradient_norm(model) as measured:
        model.text_encoder.embed.weight.sum().backward()
    assert measured == {}


def test_every_model_has_a_first_image_layer() -> None:
    conversions = models.create("fdf", host="scan", host_options=SIZES, conversions=3)
    assert conversions.first_image_weight() is conversions.images.conversions.fc.weight
    assert conversions.first_image_weight().shape == (3, 8, 12)
    for name in models.names():
        if name in ("clip", "fdf"):
            continue
        options = {**SIZES, "n_regions": 4} if name == "sgraf" else SIZES
        if name == "oscar":
            sizes = {"bert_dim": 8, "bert_layers": 1, "bert_heads": 2, "bert_hidden_dim": 4}
            options = {"vocab_size": SIZES["vocab_size"], "feature_dim": SIZES["feature_dim"], **sizes}
        model = models.create(name, **options)
        first = model.first_image_weight()
        assert first is model.image_encoder.fc.weight, name
        assert first.shape == (8, 212 if name == "pfan" else 12), name  # 200 values for the position


@pytest.mark.parametrize("options", [{}, {"mining": "selective", "epsilon": 0.05}, {"exclude_same_image": False}])
def test_the_log_has_them_at_its_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Logged scores and gradients (before clipping) are those of the logged step; other steps measure nothing."""
    trainer = make_trainer(config(data, tmp_path, log_every=2, grad_clip=1e-3, epochs=1, **options))
    seen: list[dict[str, float]] = []
    step = trainer.stepper.__class__.__call__
    norms: list[float] = []
    trainer.model.image_encoder.fc.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
    scores: list[Tensor] = []
    trainer.model.register_forward_hook(
        lambda model, _inputs, result: scores.append(result.detach().clone()) if model.training else None
    )
    images: list[Tensor] = []

    def recording(stepper: Any, batch: Any, *rest: Any, **more: Any) -> dict[str, float]:
        images.append(batch.image_index)
        seen.append(step(stepper, batch, *rest, **more))
        return seen[-1]

    monkeypatch.setattr(type(trainer.stepper), "__call__", recording)
    trainer.run()
    assert [("hardest_gap" in output, "image_grad_norm" in output) for output in seen] == [
        (False, False),
        (True, True),
    ] * 2
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        index = line["step"] - 1
        positives = images[index][:, None] == images[index] if options.get("exclude_same_image", True) else None
        mining, epsilon = options.get("mining", "hardest"), options.get("epsilon", 0.01)
        expected = by_loops(scores[index], positives, mining, epsilon)
        assert {name: line[name] for name in KEYS} == pytest.approx(expected, rel=1e-5)
        assert line["image_grad_norm"] == pytest.approx(norms[index], rel=1e-4)
        assert line["image_grad_norm"] > 1e-3


def test_measuring_changes_nothing(data: Path, tmp_path: Path) -> None:
    for name, every in (("each", 1), ("never", 1000)):
        run(config(data, tmp_path / name, mining="selective", epsilon=0.05, log_every=every))
    assert same(weights(tmp_path / "each"), weights(tmp_path / "never"))


def lines_of(mining: str, *steps: int, **numbers: float) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, "epoch": 1, "mining": mining, "loss": 10.0, **numbers, "seconds": 1.0}
        for step in steps
    ]


def test_the_report_draws_what_the_log_has() -> None:
    numbers = {"i2t_hardest_share": 0.25, "t2i_hardest_share": 0.5, "hardest_gap": 0.125, "image_grad_norm": 3.0}
    warm, main = lines_of("all", 10, 20, **numbers), lines_of("selective", 30, 40, 50, **numbers)
    curves = dict(curves_svg([*warm, *main]))
    assert list(curves) == [
        "Loss with selectively hard negatives",
        "Gradient of the first image layer",
        "Gap to the hardest negative",
        "Anchors that took their hardest negative",
    ]
    shares = curves["Anchors that took their hardest negative"]
    assert (
        'aria-label="Anchors that took their hardest negative: image to text, first 25 at step 30; last 25 at step 50; '
        in shares
    )
    assert "text to image, first 50 at step 30; last 50 at step 50" in shares
    assert ">image to text</text>" in shares
    gap = curves["Gap to the hardest negative"]
    assert "first 0.125 at step 10; last 0.125 at step 50" in gap
    assert "first 3 at step 10; last 3 at step 50" in curves["Gradient of the first image layer"]
    distances = {"hardest_distance": 0.75, "image_cosine": 0.5, "caption_cosine": -0.25}
    more = dict(curves_svg(lines_of("hardest", 10, 20, **distances)))
    assert "first 0.75 at step 10" in more["Distance to the hardest negative"]
    cosines = more["Cosine of different items"]
    assert "images, first 0.5 at step 10; last 0.5 at step 20; captions, first -0.25 at step 10" in cosines
    # If the mining selects nothing, there is no share. Older logs lack all these numbers.
    assert "Anchors that took their hardest negative" not in dict(curves_svg(lines_of("hardest", 10, 20, **numbers)))
    assert list(dict(curves_svg(lines_of("sct", 10)))) == ["Selectively contrastive triplet loss"]
    # Each drawing has unique ids, because all are on one page.
    ids = [identifier for svg in curves.values() for identifier in re.findall(r' id="([^"]+)"', svg)]
    assert len(ids) == len(set(ids))


def distances_by_loops(scores: Tensor, positives: Tensor, images: Tensor, captions: Tensor) -> dict[str, float]:
    """Return the same numbers in float64, pair by pair."""
    sides = [side.double() / side.double().norm(dim=1, keepdim=True) for side in (images, captions)]
    n, found = len(scores), []
    for (vectors, other), values, mask in ((sides, scores, positives), (sides[::-1], scores.T, positives.T)):
        for anchor in range(n):
            negatives = {j: float(values[anchor, j]) for j in range(n) if j != anchor and not bool(mask[anchor, j])}
            if negatives:
                hardest, own = other[max(negatives, key=lambda j: negatives[j])], other[anchor]
                found.append(float((hardest - own).norm()))
                # Eq 8: of the hinge's gradient t' - t, the part along the anchor only changes its norm.
                along = float(vectors[anchor] @ (hardest - own))
                turns = (hardest - own) - along * vectors[anchor]
                assert float(turns.norm()) == pytest.approx(math.sqrt(found[-1] ** 2 - along**2), abs=1e-7)
    means = [
        sum(float(side[i] @ side[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1)) for side in sides
    ]
    return {"hardest_distance": sum(found) / len(found), "image_cosine": means[0], "caption_cosine": means[1]}


@pytest.mark.parametrize("n", [2, 9])
def test_distances_and_cosines_are_those_of_loops(n: int) -> None:
    torch.manual_seed(n)
    images, captions = torch.randn(n, 4), torch.randn(n, 4)
    scores, positives = images @ captions.T, torch.zeros(n, n, dtype=torch.bool)
    positives[0, n - 2] = n > 2
    measured = embedding_diagnostics(scores, positives, images, captions)
    assert measured == pytest.approx(distances_by_loops(scores, positives, images, captions), rel=1e-5)
    # Sets stand for their mean; half precision is read as it is.
    lengths = torch.randint(1, 4, (n,))
    rows = images.bfloat16().float().repeat_interleave(lengths, 0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sets = embedding_diagnostics(scores, positives, Fragments(rows.bfloat16(), offsets), captions)
    expected = distances_by_loops(scores, positives, images.bfloat16().float(), captions)
    assert sets == pytest.approx(expected, rel=1e-5)


def test_collapsed_embeddings_and_those_that_cannot_be_compared() -> None:
    """The gap of the scores is 0 where captions differ at equal angles, too: only the distance tells them apart."""
    images = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]])
    for captions, distance, cosine in (
        (torch.tensor([[0.6, 0.8, 0], [0.6, -0.8, 0]]), 1.6 / 2, -0.28),
        (torch.tensor([[0.6, 0.8, 0], [0.6, 0.8, 0]]), 0.0, 1.0),
    ):
        scores = images @ captions.T
        assert mining_diagnostics(scores, None, "hardest", 0.01)["hardest_gap"] == 0
        measured = embedding_diagnostics(scores, None, images, captions)
        assert measured == {
            "hardest_distance": pytest.approx(distance), "image_cosine": 1.0, "caption_cosine": pytest.approx(cosine),
        }  # fmt: skip
    assert embedding_diagnostics(torch.ones(1, 1), None, images[:1], images[:1]) == {}
    assert embedding_diagnostics(scores, None, (images, images), captions) == {}
    assert embedding_diagnostics(scores, None, images[:1], captions) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"model": "vsepp"},
        {"model": "vsrn"},
        {"model": "scan"},
        {"model": "vsepp", "scenario": "oss", "micro_batch": 7},
        {"model": "scan", "scenario": "addr", "alternation": "step"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_log_has_the_distances_of_the_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """They are those of the embeddings behind the scores of the step."""
    trainer = make_trainer(config(data, tmp_path, log_every=2, epochs=1, **options))
    target, seen = trainer.stepper.scenario.target.model, []
    score, matching = type(target).score, F_itm.matching_loss

    def noting(*arguments: Any, **more: Any) -> Any:
        images, captions = arguments[-2:]
        found = score(*arguments, **more)
        if arguments[0] is target and target.training:
            seen.append((images, captions, found))
        return found

    def noting_both(queries: Any, contexts: Any, **more: Any) -> Any:
        found = matching(queries, contexts, **more)
        seen.append((*((contexts, queries) if more["attention"] == "t2i" else (queries, contexts)), found[1]))
        return found

    monkeypatch.setattr(type(target), "score", noting)
    monkeypatch.setattr(F_itm, "matching_loss", noting_both)
    batch = trainer.train_data.batch(torch.arange(0, 100, 5))
    logged = [trainer.stepper(batch, "hardest", number, diagnose=number > 2) for number in (1, 2, 3, 4)]
    assert not any("image_cosine" in numbers for numbers in logged[:2])
    numbers = logged[3]  # With ADDR, the third step trains the discriminators.
    *sides, scores = seen[-1]
    sides = [(mean_pool(side) if isinstance(side, Fragments) else side).detach() for side in sides]
    expected = embedding_diagnostics(scores.detach(), torch.eye(20, dtype=torch.bool), *sides)
    names = ("image_cosine", "caption_cosine", "hardest_distance")
    assert {name: numbers[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-6)
    assert not {"encode", "encode_fragments"} & target.__dict__.keys(), "the model is as before"
