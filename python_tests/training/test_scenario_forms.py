"""All forms of the training scenarios: every model as a branch, bfloat16, mutual learning, DBL's public code."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training.scenarios import MomentumScenario
from python_tests.helpers.bert import write_bert
from python_tests.helpers.boosting import loop_boosting
from python_tests.helpers.comparison_loops import loop_losses
from python_tests.helpers.concepts import with_boxes
from python_tests.helpers.runs import OPTIONS, config, make_trainer, same
from python_tests.helpers.triplets import loop_losses as loop_triplets

CAPTIONS = [0, 1, 7, 20, 31, 44, 57, 90]
# Every model but clip, which needs pictures, with dropout if it has any; one has RCAR's regulators, one FDF's
# conversions without realignment.
REGULATED = {"regulator": "rcar", "alignment_dim": 8, "image_encoder": "residual"}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in models.names() if name not in ("clip", "fdf")},
    "fdf": {"model": "vse_infty", "conversions": 2, "realignment": False},
    "regulated": {"model": "scan", "model_options": {**OPTIONS, **REGULATED}},
}


def trainer_of(data: Path, folder: Path, scenario: str, **changes: Any) -> Trainer:
    """Return a trainer of small models; the frozen model of oas is a different, untrained one."""
    settings = {"scenario": scenario, **changes}
    if settings.get("model") == "pfan":
        data = with_boxes(data, folder / "located")
    if settings.get("model") == "oscar":
        settings |= {"bert": str(write_bert(folder / "bert")), "model_options": {}}
    if scenario == "oas":
        of_model = ("model", "bert", "model_options", "conversions", "realignment")
        alone = {name: value for name, value in settings.items() if name in of_model}
        other = make_trainer(config(data, folder, seed=5, **alone))
        other.model.save(folder / "anchor")
        other.train_data.vocabulary.save(folder / "anchor" / "vocab.json")
        settings |= {"anchor": str(folder / "anchor"), "anchor_start": False}
    return make_trainer(config(data, folder, **settings))


def scores_in_turn(trainer: Trainer, captions: list[int] = CAPTIONS) -> tuple[Tensor | None, list[Tensor]]:
    """Return the scores of the batch by copies of the anchor and of the branches, as the next step finds them."""
    batch, scenario = trainer.train_data.batch(captions), trainer.stepper.scenario
    torch.manual_seed(3)

    def of(model: torch.nn.Module, training: bool) -> Tensor:
        with torch.no_grad(), trainer.stepper.autocast():
            return copy.deepcopy(model).train(training)(batch.features, batch.token_ids, batch.lengths)

    anchor = None if scenario.anchor is None else of(scenario.anchor, False)
    return anchor, [of(branch.model, True) for branch in scenario.branches]


def step(trainer: Trainer) -> dict[str, float]:
    torch.manual_seed(3)
    return trainer.stepper(trainer.train_data.batch(CAPTIONS), trainer.config.mining, 0)


def positives(trainer: Trainer) -> Tensor:
    images = trainer.train_data.batch(CAPTIONS).image_index
    return images[:, None] == images


def boosted(settings: TrainConfig, scores: Tensor, anchors: list[Tensor], mask: Tensor) -> tuple[float, float]:
    """Compute the target's own loss and the mean of its boosting losses by loops in float64."""
    own = loop_triplets(scores, margin=settings.margin, mining="hardest", positives=mask)[0].sum()
    margin = settings.margin if settings.boosting_margin is None else settings.boosting_margin
    losses = [
        loop_boosting(scores, one, strategy="absolute", mining="hardest", margin=margin, positives=mask).losses.sum()
        for one in anchors
    ]
    return float(own), float(sum(losses) / len(losses))


@pytest.mark.parametrize("scenario", ["oas", "oss", "mss"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_a_branch(data: Path, tmp_path: Path, model: str, scenario: str) -> None:
    """The target's loss equals the formula, and anchors learn only as their scenario says."""
    trainer = trainer_of(data, tmp_path, scenario, **MODELS[model])
    assert trainer.model.name == MODELS[model]["model"] or model == trainer.model.name == "fdf"
    whole = trainer.stepper.scenario
    anchor, branches = scores_in_turn(trainer)
    own, boosting = boosted(
        trainer.config, branches[-1], branches[:-1] if anchor is None else [anchor], positives(trainer)
    )
    before = None if whole.anchor is None else copy.deepcopy(whole.anchor.state_dict())
    output = step(trainer)
    assert output["loss"] == pytest.approx(own + boosting, rel=1e-5)
    assert output["boosting_loss"] == pytest.approx(boosting, rel=1e-4, abs=1e-5)
    assert output["grad_norm"] > 0
    if before is not None:
        assert all(parameter.grad is None for parameter in whole.anchor.parameters())
        assert same(before, whole.anchor.state_dict()) == (scenario == "oas")


@pytest.mark.parametrize("scenario", ["oas", "oss", "mss"])
def test_a_step_in_bfloat16(data: Path, tmp_path: Path, scenario: str) -> None:
    """Anchors score under the same autocast; losses are float32, and weights and averages stay float32."""
    trainer = trainer_of(data, tmp_path, scenario, precision="bfloat16", model_options=OPTIONS)
    exact = trainer_of(data, tmp_path / "exact", scenario, model_options=OPTIONS)
    anchor, branches = scores_in_turn(trainer)
    anchors = branches[:-1] if anchor is None else [anchor]
    assert {one.dtype for one in (*anchors, *branches)} == {torch.float32}
    plain = scores_in_turn(exact)
    assert not torch.equal(branches[-1], plain[1][-1])
    torch.testing.assert_close(branches[-1], plain[1][-1], rtol=0, atol=0.05)
    own, boosting = boosted(trainer.config, branches[-1], anchors, positives(trainer))
    output = step(trainer)
    assert output["loss"] == pytest.approx(own + boosting, rel=1e-5)
    assert output["boosting_loss"] == pytest.approx(boosting, rel=1e-4, abs=1e-5)
    kept = trainer.stepper.scenario
    held = [branch.model for branch in kept.branches] + ([] if kept.anchor is None else [kept.anchor])
    assert {value.dtype for model in held for value in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("scenario", ["oas", "oss", "mss"])
@pytest.mark.parametrize("captions", [[7], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("boosting", ["absolute", "relative", "rkd", "dml", "dino", "dino_inverse", "soft_rank"])
def test_without_negatives_gradients_are_finite(
    data: Path, tmp_path: Path, scenario: str, captions: list[int], boosting: str
) -> None:
    """For a single caption, and for captions of one image, only positives contribute, by the anchor's scores."""
    trainer = trainer_of(data, tmp_path, scenario, boosting=boosting)
    anchor, branches = scores_in_turn(trainer, captions)
    other, own = (branches[0] if anchor is None else anchor).double().diagonal(), branches[-1].double().diagonal()
    expected = {
        # Both directions have the same positives.
        "absolute": 2 * float((0.1 + other - own).clamp(min=0).sum()),
        "rkd": float((0.5 * (own - other) ** 2).mean()),
    }
    output = trainer.stepper(trainer.train_data.batch(captions), "hardest", 0)
    assert output["boosting_loss"] == pytest.approx(expected.get(boosting, 0.0), rel=1e-4, abs=1e-6)
    assert output["loss"] == pytest.approx(output["boosting_loss"], abs=1e-6)
    assert math.isfinite(output["grad_norm"])
    assert all(bool(one.isfinite().all()) for one in trainer.model.parameters())


def test_branches_of_deep_mutual_learning_learn_from_all_others(data: Path, tmp_path: Path) -> None:
    """As published. In DBL's public code the first branch trains as it would alone."""
    for form, one_way in (("paper", False), ("code", True)):
        trainer = trainer_of(
            data, tmp_path / form, "oss", branches=3, boosting="dml", boosting_form=form, boosting_weight=0.5
        )
        models = [branch.model for branch in trainer.stepper.scenario.branches]
        starts = [copy.deepcopy(model.state_dict()) for model in models]
        _, scores = scores_in_turn(trainer)
        mask = positives(trainer)
        output = step(trainer)
        own = loop_triplets(scores[2], margin=0.2, mining="hardest", positives=mask)[0].sum()
        pair = [
            loop_losses("DMLLoss", scores[2].double().numpy(), other.double().numpy(), mask=mask.numpy(), scale=10.0)
            for other in scores[:2]
        ]
        boosting = sum(float(one.sum()) / len(CAPTIONS) for one in pair) / 2
        assert output["boosting_loss"] == pytest.approx(boosting, rel=1e-4)
        assert output["loss"] == pytest.approx(float(own) + 0.5 * boosting, rel=1e-5)
        for index, (model, start) in enumerate(zip(models, starts, strict=True)):
            single = make_trainer(config(data, tmp_path / form / str(index)))
            single.model.load_state_dict(start)
            step(single)
            alone = one_way and index == 0
            assert same(model.state_dict(), single.model.state_dict()) == alone, (form, index)


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_mutual_branch_minimises(data: Path, tmp_path: Path, index: int) -> None:
    """Both branches have the same loss with the other one's scores, which receive no gradient."""
    trainer = trainer_of(data, tmp_path, "oss", boosting="dml")
    branch = trainer.stepper.scenario.branches[index]
    _, scores = scores_in_turn(trainer)
    batch, mask = trainer.train_data.batch(CAPTIONS), positives(trainer)
    alone = copy.deepcopy(branch.model).train()
    found = alone(batch.features, batch.token_ids, batch.lengths)
    functions = trainer.stepper._functions(batch, "hardest", mask)
    (functions.loss(found) + functions.boosting_loss(found, scores[1 - index])).backward()
    step(trainer)
    clipped = torch.nn.utils.clip_grad_norm_(alone.parameters(), trainer.config.grad_clip)
    assert float(clipped) > 0
    for (name, one), other in zip(alone.named_parameters(), branch.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("boosting", "name", "options"),
    [
        ("soft_rank", "SoftRankLoss", {"transfer": "dbl", "length": 4}),
        ("rkd", "RKDLoss", {"normalize": False, "weight": 10.0}),
        ("dml", "DMLLoss", {"scale": 10.0}),
        ("dino_inverse", "DINOLoss", {"inverse": True, "divergence": True, "scale": 10.0, "anchor_scale": 10.0}),
    ],
)
def test_losses_beside_an_anchor_as_the_public_code_has_them(
    data: Path, tmp_path: Path, boosting: str, name: str, options: dict[str, Any]
) -> None:
    trainer = trainer_of(data, tmp_path, "oas", boosting=boosting, boosting_form="code")
    anchor, (scores,) = scores_in_turn(trainer)
    mask = positives(trainer).numpy()
    each = loop_losses(name, scores.double().numpy(), anchor.double().numpy(), mask=mask, **options)
    # RKD's mean over the rows equals its mean over all pairs.
    expected = float((each[0] if boosting == "rkd" else each).sum()) / len(CAPTIONS)
    assert step(trainer)["boosting_loss"] == pytest.approx(expected, rel=1e-4)


def test_boosting_can_have_a_margin_of_its_own(data: Path, tmp_path: Path) -> None:
    """DBL's public code has a factor for it; a branch's own loss keeps --margin, or has no margin."""
    trainer = trainer_of(data, tmp_path, "mss", boosting_margin=0.4)
    anchor, (scores,) = scores_in_turn(trainer)
    own, boosting = boosted(trainer.config, scores, [anchor], positives(trainer))
    output = step(trainer)
    assert output["loss"] == pytest.approx(own + boosting, rel=1e-5)
    with_that = step(trainer_of(data, tmp_path, "mss", margin=0.4))
    assert output["boosting_loss"] == pytest.approx(with_that["boosting_loss"], rel=1e-6)
    assert output["loss"] < with_that["loss"] - 1
    settings = {"data": "d", "out": "o", "scenario": "mss", "loss": "cmpm", "mining": "all"}
    assert TrainConfig(**settings, margin=0.3).margin == 0.3
    with pytest.raises(
        ValueError,
        match=r"^margin: 0\.3 goes with the loss clipped_sct or polynomial or self_expanding or triplet, not cmpm$",
    ):
        TrainConfig(**settings, margin=0.3, boosting_margin=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scenario": "mss", "boosting_form": "code"},
         "boosting_form: 'code' goes with the boosting soft_rank or rkd or dml or dino_inverse, not absolute"),
        ({"scenario": "mss", "boosting": "dino", "boosting_form": "code"},
         "boosting_form: 'code' goes with the boosting soft_rank or rkd or dml or dino_inverse, not dino"),
        ({"boosting_form": "code"}, "boosting_form: 'code' goes with the scenario oas or oss or mss, not single"),
        ({"scenario": "oss", "boosting": "dml", "boosting_form": "public"},
         "boosting_form: expected one of paper, code, got 'public'"),
        ({"scenario": "mss", "boosting": "rkd", "boosting_margin": 0.1},
         "boosting_margin: 0.1 goes with the boosting absolute or relative or both, not rkd"),
        ({"boosting_margin": 0.1}, "boosting_margin: 0.1 goes with the scenario oas or oss or mss, not single"),
        ({"scenario": "mss", "boosting_margin": -0.1}, "boosting_margin: expected a number at least 0, got -0.1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        TrainConfig(data="d", out="o", **settings)
    assert str(refusal.value) == message


@pytest.mark.parametrize("momentum", [-0.1, 1.5, float("nan")])
def test_a_momentum_out_of_bounds(data: Path, tmp_path: Path, momentum: float) -> None:
    target = trainer_of(data, tmp_path, "single").stepper.scenario.target
    with pytest.raises(ValueError, match=rf"^momentum: expected a number within \[0, 1\], got {momentum}$"):
        MomentumScenario(target, 1.0, momentum, 8)
