"""The training loss: allowed combinations of settings, and that a step uses the configured loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from itm_fast import cli, models
from itm_fast.ops.triplet_loss import MINING as OPERATOR_MINING
from itm_fast.ops.triplet_loss import SELECTIVE_DIVISORS
from itm_fast.training import TrainConfig, Trainer, train
from itm_fast.training.config import read_yaml
from itm_fast.training.loss_rules import MINING
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.objective import make_losses
from itm_fast.training.plateau import PlateauWarning
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.comparison_loops import loop_losses
from python_tests.helpers.runs import config, make_trainer, run, same, stop_at, weights
from python_tests.helpers.triplets import loop_losses as loop_triplets

# Settings of a loss, and the loops that compute it.
LOSSES: tuple[dict[str, Any], ...] = (
    {"mining": "selective", "epsilon": 0.05, "margin": 0.3},
    {"mining": "selective", "epsilon": 0.05, "selective_divisor": "negatives", "halve_loss": True},
    {"mining": "semi_hard"},
    {"mining": "sct"},
    {"mining": "all", "halve_loss": True},
    {"loss": "polynomial", "margin": 0.1},
    {"loss": "cmpm", "mining": "all", "softmax_scale": 8.0},
    {"mining": "selective", "epsilon": 0.05, "selective_divisor": "negatives", "halve_loss": True, "mean_loss": True},
    {"mining": "all", "mean_loss": True},
    {"loss": "polynomial", "mean_loss": True},
    {"loss": "cmpm", "mining": "all", "softmax_scale": 10.0, "mean_loss": True},
)


# Boosting losses without a gradient at equal scores, and the form in which they have none.
TWINS = [
    *({"boosting": name} for name in ("soft_rank", "rkd", "dml", "dino")),
    *({"boosting": name, "boosting_form": "code"} for name in ("rkd", "dml", "dino_inverse")),
]


def by_loops(scores: torch.Tensor, positives: torch.Tensor, **options: Any) -> float:
    loss = options.pop("loss", "triplet")
    if options.pop("mean_loss", False):
        return by_loops(scores, positives, loss=loss, **options) / len(scores)
    if loss == "triplet":
        options["halve"] = options.pop("halve_loss", False)
        return float(loop_triplets(scores, positives=positives, **options)[0].sum())
    if loss == "polynomial":
        each = loop_losses("PolynomialLoss", scores.double().numpy(), mask=positives.numpy(), **options)
    else:
        scale = options["softmax_scale"]
        each = loop_losses("CMPMLoss", scores.double().numpy(), mask=positives.numpy(), scale=scale)
    return float(each.sum())


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_a_step_has_the_loss_that_the_settings_name(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make_trainer(config(data, tmp_path, **options))
    seen: list[torch.Tensor] = []
    trainer.model.register_forward_hook(lambda _model, _inputs, scores: seen.append(scores.detach()))
    batch = trainer.train_data.batch([0, 1, 5, 12, 20, 31, 44, 45, 57, 80])
    value = trainer._step(batch)["loss"]
    positives = batch.image_index[:, None] == batch.image_index
    assert value == pytest.approx(by_loops(seen[0], positives, **options), rel=1e-5)


def test_the_choices_are_those_of_the_operator() -> None:
    assert set(MINING) == set(OPERATOR_MINING)
    (field,) = (field for field in attrs.fields(TrainConfig) if field.name == "selective_divisor")
    assert field.metadata["choices"] == SELECTIVE_DIVISORS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cmpm", "mining": "hardest"}, "mining: the loss cmpm takes all, got 'hardest'"),
        ({"loss": "polynomial", "mining": "selective"}, "mining: the loss polynomial takes hardest, got 'selective'"),
        ({"loss": "cmpm", "mining": "all", "margin": 0.5},
         "margin: 0.5 goes with the loss clipped_sct or polynomial or self_expanding or triplet, not cmpm"),
        ({"loss": "cmpm", "mining": "all", "warmup_epochs": 1},
         "warmup_epochs: 1 goes with the loss bce or clipped_sct or polynomial or self_expanding or triplet, not cmpm"),
        ({"loss": "polynomial", "halve_loss": True},
         "halve_loss: True goes with the loss infonce or matching_bce or triplet, not polynomial"),
        ({"softmax_scale": 2.0}, "softmax_scale: 2.0 goes with the loss cmpm, not triplet"),
        ({"epsilon": 0.1}, "epsilon: 0.1 goes with the mining selective, not hardest"),
        ({"mining": "all", "selective_divisor": "negatives"},
         "selective_divisor: 'negatives' goes with the mining selective, not all"),
        ({"loss": "triplets"},
         "loss: unknown loss 'triplets': did you mean 'triplet'? (or install the package that adds it)"),
        ({"mining": "selective", "epsilon": -1}, "epsilon: expected a number at least 0, got -1"),
        ({"model": "clip", "clip": "c", "scenario": "ncr"},
         "clip: expected none with the scenario ncr: all networks would start from the same weights"),
        *(({"model": "clip", "clip": "c", "scenario": "oss", **options},
           f"clip: expected none with the boosting {options['boosting']}: all networks would start from the same "
           "weights")
          for options in TWINS),
        ({"start": "s", "scenario": "oss", "branches": 3, "boosting_mining": "all"},
         "boosting_mining: expected hardest with start and 3 branches: from the same weights, branches with all "
         "negatives stay equal"),
        *(({"scenario": scenario, "loss_options": {"directions": "rows"}},
           f"loss_options: expected none with the {scenario}, which has losses of its own")
          for scenario in ("aoq", "ncr", "meta_spn")),
        ({"conversions": 2, "loss_options": {"directions": "rows"}},
         "loss_options: expected none with the realignment of several conversions, which has losses of its own"),
        ({"start": "s", "scenario": "ncr"},
         "start: expected none with the scenario ncr: all networks would start from the same weights"),
        ({"start": "s", "scenario": "oss", "boosting": "rkd"},
         "start: expected none with the boosting rkd: all networks would start from the same weights"),
        ({"start": "s", "scenario": "oss", "conversions": 2, "realignment": False},
         "start: expected none with the scenario oss and conversions, which start from random weights"),
        ({"start": "s", "scenario": "oas", "anchor": "a"},
         "start: expected none where the model starts from its anchor; --no-anchor-start allows it"),
        *(({"start": "s", name: "x"}, f"{name}: expected none with --start, whose model has its own")
          for name in ("bert", "clip", "image_backbone")),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        TrainConfig(data="d", out="o", **options)
    assert str(refusal.value) == message


def test_the_command_line_says_it_in_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    status, message = error(capsys, "train", "--data", data, "--out", out, *SMALL, "--epsilon", "0.1")
    assert (status, message) == (1, "epsilon: 0.1 goes with the mining selective, not hardest")
    assert not out.exists()
    arguments = ["train", "--data", str(data), "--out", str(out), *SMALL, "--mining", "selective", "--epsilon", "0.1"]
    assert cli.run([*arguments, "--selective-divisor", "negatives", "--halve-loss"]) == 0
    lines = read_metrics(out / "metrics.jsonl")
    assert {line["mining"] for line in lines if line["kind"] == "train"} == {"selective"}


@pytest.mark.parametrize("loss", ["bce", "cmpm", "infonce", "matching_bce", "polynomial", "siglip", "triplet"])
def test_a_loss_takes_its_own_negatives_if_none_are_named(loss: str) -> None:
    own = dict.fromkeys(("cmpm", "infonce", "matching_bce", "siglip"), "all")
    assert TrainConfig(data="d", out="o", loss=loss).resolved().mining == own.get(loss, "hardest")
    assert TrainConfig(data="d", out="o", loss="bce", mining="all").mining == "all"


def test_the_negatives_of_a_loss_are_saved_logged_and_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["--data", str(data), "--out", str(out), *SMALL, "--loss", "infonce", "--log-every", "1"]
    assert cli.run(["train", *arguments]) == 0
    assert "loss: infonce, negatives: all" in capsys.readouterr().out.splitlines()
    assert read_yaml(out / "train.yaml")["mining"] == "all"
    assert {line["mining"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"} == {"all"}
    assert cli.run(["train", "--out", str(out), "--resume", "--epochs", "2"]) == 0


def test_a_line_tells_when_the_negatives_change(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The summary names the negatives of all epochs. A resumed run does not repeat the line within the epoch."""
    settings = config(data, tmp_path / "run", epochs=3, warmup_epochs=2)
    with monkeypatch.context() as patch:
        stop_at(patch, 10)
        train(settings)
    first = "".join(capfd.readouterr())
    assert "\nloss: triplet, negatives: all in epochs 1 to 2, then hardest\n" in first
    assert first.count("epoch 3/3: negatives now hardest, before all\n") == 1
    train(settings, resume=True)
    assert "negatives now" not in "".join(capfd.readouterr())
    own = attrs.evolve(settings, out=str(tmp_path / "own"), epochs=2, warmup_epochs=1)
    train(own, loss=lambda scores: (scores.diagonal() - scores.mean()).square().sum())
    assert "negatives now" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_every_loss_learns_the_concepts(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Twelve steps on one batch; hinge losses start with a step of all negatives if they need one."""
    changes = {name: value for name, value in options.items() if name not in ("epsilon", "margin")}
    trainer = make_trainer(config(data, tmp_path, lr=1e-2, **changes))
    batch = trainer.train_data.batch(torch.arange(0, 40, 5))
    losses = [trainer._step(batch)["loss"] for _ in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses


def test_a_warm_up_has_the_triplet_loss_of_all_negatives(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", loss="polynomial", warmup_epochs=1, log_every=1)
    run(settings)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["mining"] for line in lines] == ["all"] * 4 + ["hardest"] * 4
    # All negatives of 32 captions cost many margins; the two polynomials of an anchor are below 2.
    assert min(line["loss"] for line in lines[:4]) > 2 * 2 * 32 > max(line["loss"] for line in lines[4:])


def test_a_warm_up_has_the_options_of_the_triplet_loss() -> None:
    settings = TrainConfig(out="run", loss_options={"directions": "rows"})
    model = models.create("vsepp", vocab_size=7, feature_dim=3, embed_dim=4, word_dim=2)
    made = make_losses(settings, model)
    assert {name: loss.directions for name, loss in made.items()} == {"all": "rows", "hardest": "rows"}
    others = make_losses(attrs.evolve(settings, loss="polynomial", loss_options={}), model)
    assert others["all"].directions == "both"


def test_a_run_with_selhn_is_resumed_exactly(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and log, with diagnostics, equal those of an uninterrupted run."""
    settings = config(data, tmp_path / "whole", mining="selective", epsilon=0.05, warmup_epochs=1, log_every=2)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = Trainer._step

    def stopping(self: Trainer, batch: object) -> dict[str, float]:
        if self.engine.state.iteration == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        assert run(parts).steps == 5
    assert run(parts, resume=True).steps == 8
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    logs = [
        [{**line, "seconds": 0} for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    ]
    assert logs[0] == logs[1]
    assert sum("hardest_gap" in line for line in logs[0]) == 4


@pytest.mark.parametrize("scenario", ["oss", "mss"])
@pytest.mark.parametrize(("halve", "mean"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_boosting_loss_weighs_as_much_as_the_branch_s_own(
    data: Path, tmp_path: Path, scenario: str, halve: bool, mean: bool
) -> None:
    """If the branch's loss is halved or a mean, so is the boosting loss: with equal scores, each equals the margin."""
    changes = {"boosting": "relative", "margin": 0.3}
    trainer = make_trainer(config(data, tmp_path, scenario=scenario, halve_loss=halve, mean_loss=mean, **changes))
    for branch in trainer.stepper.scenario.models:
        with torch.no_grad():
            branch.text_encoder.embed.weight.zero_()
            branch.image_encoder.fc.weight.zero_()
            branch.image_encoder.fc.bias.fill_(1.0)
    numbers = trainer._step(trainer.train_data.batch(torch.arange(0, 100, 5)))
    own = (1 if mean else 20) * 0.3 * (1 if halve else 2)
    assert numbers["loss"] == pytest.approx(2 * own, rel=1e-4)
    assert numbers["boosting_loss"] == pytest.approx(own * (2 if halve else 1), rel=1e-4)


@pytest.mark.parametrize(("halve", "mean"), [(False, False), (True, False), (True, True)])
def test_the_plateau_is_known_in_halves_and_means_too(data: Path, tmp_path: Path, halve: bool, mean: bool) -> None:
    trainer = make_trainer(config(data, tmp_path, halve_loss=halve, mean_loss=mean))
    with torch.no_grad():
        trainer.model.text_encoder.embed.weight.zero_()
        trainer.model.image_encoder.fc.weight.zero_()
        trainer.model.image_encoder.fc.bias.fill_(1.0)
    trainer.stepper.plateau.patience = 1
    with pytest.warns(PlateauWarning, match="use --mining selective, or lower --lr"):
        value = trainer._step(trainer.train_data.batch(torch.arange(0, 100, 5)))["loss"]
    assert value == pytest.approx((1 if mean else 20) * 0.2 * (1 if halve else 2), rel=1e-4)
