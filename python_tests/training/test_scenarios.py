"""One step of each training scenario: objectives of the branches, anchors, and changed weights."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from itm_fast import losses
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training.scenarios import momentum_at
from python_tests.helpers.boosting import loop_boosting
from python_tests.helpers.runs import OPTIONS, config, make_trainer, run, same
from python_tests.helpers.triplets import loop_losses

CAPTIONS = [0, 1, 7, 20, 31, 44, 57, 90]
# Batch normalisation has floating point buffers and an integer count.
RESIDUAL = {**OPTIONS, "image_encoder": "residual"}


@pytest.fixture(scope="module")
def anchor(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model for use as the frozen anchor."""
    out = tmp_path_factory.mktemp("anchor") / "run"
    run(config(data, out, epochs=1, seed=5, model_options=RESIDUAL))
    return out


def trainer_of(data: Path, out: Path, scenario: str, anchor: Path | None = None, **changes: object) -> Trainer:
    options = {"anchor": str(anchor)} if scenario == "oas" else {}
    return make_trainer(config(data, out, scenario=scenario, **{"model_options": RESIDUAL, **options, **changes}))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def scores_of(trainer: Trainer, model: nn.Module, *, training: bool) -> Tensor:
    """Return the scores of the batch by a copy of a model, which itself does not change."""
    batch = trainer.train_data.batch(CAPTIONS)
    with torch.no_grad():
        return copy.deepcopy(model).train(training)(batch.features, batch.token_ids, batch.lengths)


def by_hand(settings: TrainConfig, images: Tensor, scores: Tensor, anchors: list[Tensor], mining: str) -> Tensor:
    """Compute the loss of a branch in float64 by loops over the equations, with the mean over its anchors."""
    positives = images[:, None] == images if settings.exclude_same_image else None
    own = loop_losses(scores, margin=settings.margin, mining=mining, positives=positives)[0].sum()
    if not anchors:
        return own
    boosting = [
        loop_boosting(
            scores, one, strategy=settings.boosting or "absolute", mining=settings.boosting_mining,
            margin=settings.margin, alpha=settings.boosting_alpha, soft=settings.soft, positives=positives,
        ).losses.sum()
        for one in anchors
    ]  # fmt: skip
    return own + settings.boosting_weight * sum(boosting) / len(boosting)


def gradient_norm(trainer: Trainer, anchor_scores: Tensor, mining: str) -> float:
    """Return the norm of the gradient of both losses with respect to the weights of a copy of the target."""
    settings, batch = trainer.config, trainer.train_data.batch(CAPTIONS)
    positives = batch.image_index[:, None] == batch.image_index if settings.exclude_same_image else None
    model = copy.deepcopy(trainer.model).train()
    scores = model(batch.features, batch.token_ids, batch.lengths)
    boosting = losses.BoostingLoss(
        settings.margin, strategy=settings.boosting or "absolute", mining=settings.boosting_mining,
        alpha=settings.boosting_alpha, soft=settings.soft,
    )  # fmt: skip
    own = losses.TripletLoss(settings.margin, mining=mining)(scores, positives=positives)
    (own + settings.boosting_weight * boosting(scores, anchor_scores, positives=positives)).backward()
    return math.sqrt(sum(float(one.grad.square().sum()) for one in model.parameters() if one.grad is not None))


@pytest.mark.parametrize("scenario", ["oas", "mss"])
@pytest.mark.parametrize(
    ("changes", "mining"),
    [
        ({}, "hardest"),
        ({"boosting": "relative", "boosting_weight": 0.25, "exclude_same_image": False}, "hardest"),
        ({"boosting": "both", "boosting_mining": "all", "soft": True, "boosting_alpha": 0.3}, "all"),
    ],
)
def test_the_target_minimises_its_own_loss_and_the_boosting_loss(
    data: Path, tmp_path: Path, anchor: Path, scenario: str, changes: dict, mining: str
) -> None:
    """The anchor scores in evaluation mode; the target's loss has both parts, whose gradient Adam takes."""
    trainer = trainer_of(data, tmp_path, scenario, anchor, **changes)
    scenario_of = trainer.stepper.scenario
    with torch.no_grad():
        # An anchor that differs from the target, as later in a training.
        for parameter in scenario_of.anchor.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    batch = trainer.train_data.batch(CAPTIONS)
    target_scores = scores_of(trainer, trainer.model, training=True)
    anchor_scores = scores_of(trainer, scenario_of.anchor, training=False)
    assert not torch.allclose(anchor_scores, scores_of(trainer, scenario_of.anchor, training=True), atol=1e-3)
    expected = by_hand(trainer.config, batch.image_index, target_scores, [anchor_scores], mining)
    own = by_hand(trainer.config, batch.image_index, target_scores, [], mining)
    norm = gradient_norm(trainer, anchor_scores, mining)
    output = trainer.stepper(batch, mining, 0)
    assert output["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert output["loss"] == pytest.approx(float(expected), rel=1e-5)
    weight = trainer.config.boosting_weight
    assert output["boosting_loss"] == pytest.approx(float(expected - own) / weight, rel=1e-4)
    assert output["boosting_loss"] > 0.1


@pytest.mark.parametrize(
    ("boosting", "loss"),
    [
        ("soft_rank", losses.SoftRankLoss(reduction="mean")),
        ("rkd", losses.RKDLoss(normalize=False, directions="rows", reduction="mean")),
        ("dml", losses.DMLLoss(scale=10.0, reduction="mean")),
        ("dino", losses.DINOLoss(scale=10.0, anchor_scale=10.0, reduction="mean")),
        ("dino_inverse", losses.DINOLoss(scale=10.0, anchor_scale=10.0, inverse=True, reduction="mean")),
    ],
)
def test_what_boosting_is_compared_with(
    data: Path, tmp_path: Path, anchor: Path, boosting: str, loss: nn.Module
) -> None:
    """Losses that imitate an anchor replace the boosting loss; captions of the same image are no negatives."""
    trainer = trainer_of(data, tmp_path, "oas", anchor, boosting=boosting, anchor_start=False)
    batch = trainer.train_data.batch(CAPTIONS)
    scores = scores_of(trainer, trainer.model, training=True)
    anchor_scores = scores_of(trainer, trainer.stepper.scenario.anchor, training=False)
    same_image = batch.image_index[:, None] == batch.image_index
    output = trainer.stepper(batch, "hardest", 0)
    assert output["boosting_loss"] == pytest.approx(float(loss(scores, anchor_scores, positives=same_image)), rel=1e-5)
    assert output["loss"] == pytest.approx(
        float(by_hand(trainer.config, batch.image_index, scores, [], "hardest")) + output["boosting_loss"], rel=1e-5
    )


def test_branches_minimise_their_loss_beside_each_branch_before_them(data: Path, tmp_path: Path) -> None:
    """All forwards come first; each branch then takes the step that it would take alone by the gradient of its loss."""
    trainer = trainer_of(data, tmp_path, "oss", branches=3, boosting="relative")
    branches = trainer.stepper.scenario.branches
    assert [len(branch.optimizer.param_groups) for branch in branches] == [1, 1, 1]
    assert branches[-1].model is trainer.model
    starts = [state_of(branch.model) for branch in branches]
    assert not any(same(starts[i], starts[j]) for i, j in ((0, 1), (0, 2), (1, 2))), "random weights of their own"
    batch = trainer.train_data.batch(CAPTIONS)
    scores = [scores_of(trainer, branch.model, training=True) for branch in branches]
    expected = [by_hand(trainer.config, batch.image_index, scores[k], scores[:k], "hardest") for k in range(3)]

    copies = [copy.deepcopy(branch.model).train() for branch in branches]
    output = trainer.stepper(batch, "hardest", 0)
    assert output["loss"] == pytest.approx(float(expected[2]), rel=1e-5)
    for k, (branch, alone) in enumerate(zip(branches, copies, strict=True)):
        own = alone(batch.features, batch.token_ids, batch.lengths)
        step = trainer.stepper._functions(batch, "hardest", batch.image_index[:, None] == batch.image_index)
        loss = step.loss(own)
        if k:
            loss = loss + torch.stack([step.boosting_loss(own, one) for one in scores[:k]]).mean()
        assert float(loss.detach()) == pytest.approx(float(expected[k]), rel=1e-5)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), trainer.config.grad_clip)
        if k == 2:
            assert output["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        changed = dict(branch.model.named_parameters())
        for name, parameter in alone.named_parameters():
            # Adam's first step divides a gradient by its size; at about 1e-8, rounding decides.
            clear = parameter.grad.abs() > 1e-6
            moved = starts[k][name] - trainer.config.lr * parameter.grad / (parameter.grad.abs() + 1e-8)
            torch.testing.assert_close(changed[name].detach()[clear], moved[clear], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("scenario", ["oas", "mss"])
def test_an_anchor_receives_no_gradient(data: Path, tmp_path: Path, anchor: Path, scenario: str) -> None:
    """The anchor's forward keeps nothing, the optimiser does not contain it, and its mode never changes."""
    trainer = trainer_of(data, tmp_path, scenario, anchor)
    frozen = trainer.stepper.scenario.anchor
    grad_modes = []
    frozen.register_forward_hook(
        lambda module, _inputs, scores: grad_modes.append((module.training, scores.requires_grad))
    )
    before = state_of(frozen)
    for step in range(3):
        trainer.stepper(trainer.train_data.batch(CAPTIONS), "hardest", step)
    assert grad_modes == [(False, False)] * 3
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen.parameters())
    groups = trainer.stepper.scenario.target.optimizer.param_groups
    learned = {id(parameter) for group in groups for parameter in group["params"]}
    assert learned == {id(parameter) for parameter in trainer.model.parameters()}
    if scenario == "oas":
        assert same(before, state_of(frozen))


def test_an_earlier_branch_receives_no_gradient_from_a_later_one(data: Path, tmp_path: Path) -> None:
    """The first of two branches trains as it would without the second."""
    options = {"model_options": RESIDUAL, "boosting_weight": 3.0}
    both = trainer_of(data, tmp_path, "oss", **options)
    first = both.stepper.scenario.branches[0]
    single = trainer_of(data, tmp_path, "single", model_options=RESIDUAL)
    single.model.load_state_dict(first.model.state_dict())
    for step in range(3):
        batch = both.train_data.batch([caption + step for caption in CAPTIONS])
        both.stepper(batch, "hardest", step)
        single.stepper(batch, "hardest", step)
    assert same(state_of(first.model), state_of(single.model))
    assert not same(state_of(both.model), state_of(single.model))


def test_the_average_follows_its_schedule(data: Path, tmp_path: Path) -> None:
    """Parameters and buffers follow in float64 from the weights after each step and its momentum."""
    trainer = trainer_of(data, tmp_path, "mss", ema_decay=0.6)
    average = trainer.stepper.scenario.anchor
    assert same(state_of(average), state_of(trainer.model))
    expected = {name: value.double() for name, value in state_of(trainer.model).items()}
    kept = []
    for step in range(8):
        trainer.stepper(trainer.train_data.batch([caption + step for caption in CAPTIONS]), "hardest", step)
        momentum = 1 - 0.4 * (1 + math.cos(math.pi * step / 8)) / 2
        kept.append(momentum)
        for name, value in trainer.model.state_dict().items():
            if value.is_floating_point():
                expected[name] = momentum * expected[name] + (1 - momentum) * value.double()
            else:
                expected[name] = value.double()
    assert kept[0] == pytest.approx(0.6)
    assert kept == sorted(kept)
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
    buffers = {name for name, _ in average.named_buffers()}
    counts = [name for name in buffers if name.endswith("num_batches_tracked")]
    assert {"running_mean", "running_var"} < {name.rsplit(".")[-1] for name in buffers}
    assert [int(average.state_dict()[name]) for name in counts] == [8]


def test_a_tied_weight_of_the_average_moves_once_a_step(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(data, tmp_path, "mss", ema_decay=0.6)
    scenario = trainer.stepper.scenario
    for model in (trainer.model, scenario.average):
        model.tied = model.text_encoder.embed
    name = next(name for name in state_of(scenario.average) if name.startswith("tied."))
    before = state_of(scenario.average)[name].double()
    trainer.stepper(trainer.train_data.batch(CAPTIONS), "hardest", 0)
    expected = 0.6 * before + 0.4 * state_of(trainer.model)[name].double()
    torch.testing.assert_close(state_of(scenario.average)[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_weights_of_the_average_lie_together(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise cuDNN gathers those of a GRU at every call."""
    gathered = []
    flatten = nn.GRU.flatten_parameters
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda gru: (gathered.append(id(gru)), flatten(gru))[1])
    average = trainer_of(data, tmp_path, "mss").stepper.scenario.anchor
    grus = [id(module) for module in average.modules() if isinstance(module, nn.GRU)]
    assert len(grus) > 0
    assert set(grus) <= set(gathered)


def test_the_momentum_rises_along_a_cosine() -> None:
    values = [momentum_at(step, 100, 0.99995) for step in range(101)]
    assert (values[0], values[100]) == (0.99995, 1.0)
    assert values[50] == pytest.approx(1 - 0.5 * 5e-5, abs=1e-15)
    assert values == sorted(values)
    assert [momentum_at(step, 7, 1.0) for step in (0, 3, 7)] == [1.0] * 3
    assert momentum_at(0, 7, 0.0) == 0.0


@pytest.mark.parametrize("start", [True, False])
def test_the_target_starts_from_the_anchor_or_from_scratch(
    data: Path, tmp_path: Path, anchor: Path, start: bool
) -> None:
    trainer = trainer_of(data, tmp_path, "oas", anchor, anchor_start=start)
    fresh = trainer_of(data, tmp_path, "single")
    expected = trainer.stepper.scenario.anchor if start else fresh.model
    assert same(state_of(trainer.model), state_of(expected))
    assert same(state_of(trainer.model), state_of(fresh.model)) == (not start)


def test_a_batch_of_one_has_no_negatives(data: Path, tmp_path: Path) -> None:
    """The negative terms are zero and the gradients finite: absolute pays for its positive, twice, relative nothing."""
    for boosting, expected in (("absolute", 2 * 0.1), ("relative", 0.0)):
        trainer = trainer_of(data, tmp_path, "mss", boosting=boosting, model_options=OPTIONS)
        output = trainer.stepper(trainer.train_data.batch([3]), "hardest", 0)
        assert output["boosting_loss"] == pytest.approx(expected, abs=1e-6)
        assert math.isfinite(output["grad_norm"])


def test_no_branch_changes_where_a_later_loss_is_not_finite(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(data, tmp_path, "oss", model_options=OPTIONS)
    first, second = (branch.model for branch in trainer.stepper.scenario.branches)
    with torch.no_grad():
        second.image_encoder.fc.bias[0] = math.nan
    before = state_of(first)
    with pytest.raises(ValueError, match="the loss became nan at step 4; lower --lr, or look at the features"):
        trainer.stepper(trainer.train_data.batch(CAPTIONS), "hardest", 4)
    assert same(before, state_of(first))
