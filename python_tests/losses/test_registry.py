"""Losses by name: `register`, options, and losses of other installed packages."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

from itm_fast import losses, models
from itm_fast.losses import registry
from itm_fast.training import TrainConfig
from itm_fast.training.checkpoint import load_state
from itm_fast.training.config import read_yaml
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import error
from python_tests.helpers.runs import config, make_trainer, run

PLUGIN_LOSS = '''
import torch
from torch import nn
from itm_fast.losses import register

@register("pull")
class Pull(nn.Module):
    """The distance of the positives from a target."""
    def __init__(self, target: float = 1.0, reduction: str = "sum"):
        super().__init__()
        self.target = target

    def forward(self, scores, *, positives=None):
        return (scores.diagonal() - self.target).square().sum()
'''
PLUGIN_MODEL = """
import attrs
from itm_fast import models
from itm_fast.config import setting

@attrs.frozen(kw_only=True)
class TinyConfig(models.VSEPPConfig):
    pass

@models.register
class Tiny(models.VSEPP):
    name = "tiny"
    Config = TinyConfig
"""


@pytest.fixture
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove everything that a test registers."""
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    monkeypatch.setattr(models.base, "_MODELS", dict(models.base._MODELS))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, code: str) -> None:
    """Install a distribution with one module and one entry point into `folder`, and put it on the path."""
    module = f"plugin_of_{name}"
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_losses_of_the_package() -> None:
    assert {"cmpm", "polynomial", "triplet"} <= set(losses.names())
    assert registry.find("triplet").make is losses.TripletLoss
    made = registry.create("triplet", {"margin": 0.3, "mining": "all", "halve": True, "scale": 2.0}, {})
    assert isinstance(made, losses.TripletLoss)
    assert (made.margin, made.mining, made.halve) == (0.3, "all", True)


@pytest.mark.usefixtures("_forget")
def test_a_registered_loss_gets_settings_and_options() -> None:
    @losses.register("push")
    class Push(nn.Module):
        def __init__(self, margin: float, gamma: float = 1.0) -> None:
            super().__init__()
            self.margin, self.gamma = margin, gamma

        def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
            return self.gamma * torch.relu(self.margin - scores.diagonal()).sum()

    made = registry.create("push", {"margin": 0.5, "epsilon": 0.1}, {"gamma": 2.0})
    assert made(torch.zeros(3, 3)).item() == 3.0
    assert TrainConfig(data="d", out="o", loss="push", margin=0.7, loss_options={"gamma": 3.0}).loss == "push"
    with pytest.raises(ValueError, match=r"^softmax_scale: 2.0 goes with the loss cmpm, not push$"):
        TrainConfig(data="d", out="o", loss="push", softmax_scale=2.0)
    with pytest.raises(ValueError, match=r"^loss_options: unknown option of push 'gama': did you mean 'gamma'\?$"):
        TrainConfig(data="d", out="o", loss="push", loss_options={"gama": 3.0})
    with pytest.raises(ValueError, match=r"^loss 'push' is registered twice: by "):
        losses.register("push")(losses.TripletLoss)


@pytest.mark.usefixtures("_forget")
def test_a_loss_of_an_installed_package_trains(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "itm_fast.losses", "pull", PLUGIN_LOSS)
    assert "pull" in losses.names()
    assert "plugin_of_pull" not in sys.modules
    settings = config(data, tmp_path / "run", loss="pull", loss_options={"target": 0.5}, margin=0.2, epochs=1)
    made = make_trainer(settings).stepper.losses["hardest"]
    assert type(made).__module__ == "plugin_of_pull"
    assert made.target == 0.5
    assert run(settings).finished
    saved = tmp_path / "run" / "train.yaml"
    assert read_yaml(saved)["loss_options"] == {"target": 0.5}
    assert "plugin_of" not in saved.read_text()


@pytest.mark.usefixtures("_forget")
def test_a_warm_up_trains_the_parameters_of_the_loss(data: Path, tmp_path: Path) -> None:
    @losses.register("learned", mining=("hardest", "all"))
    class Learned(nn.Module):
        def __init__(self, mining: str) -> None:
            super().__init__()
            self.loss, self.scale = losses.TripletLoss(0.2, mining=mining), nn.Linear(1, 1, bias=False)

        def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
            return self.loss(self.scale(scores[..., None])[..., 0], positives=positives)

    settings = config(data, tmp_path, loss="learned", warmup_epochs=1, log_every=1)
    run(settings)
    found = [line["loss_weight"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert len(set(found)) == len(found), "each step changes it"
    kept = load_state(tmp_path)["loss"]
    assert kept["all.scale.weight"] == kept["hardest.scale.weight"] == found[-1]
    assert run(attrs.evolve(settings, epochs=3), resume=True).finished


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_loss_learns_after_a_warm_up_without_it(data: Path, tmp_path: Path, epochs: int) -> None:
    """A run resumes from within the warm-up, which is the first epoch, and from after it."""

    @losses.register("late", mining=("hardest",))
    class Late(nn.Module):
        def __init__(self, margin: float, mining: str) -> None:
            super().__init__()
            self.loss, self.scale = losses.TripletLoss(margin, mining=mining), nn.Parameter(torch.ones(()))

        def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
            return self.loss(self.scale * scores, positives=positives)

    settings = config(data, tmp_path, loss="late", warmup_epochs=1, epochs=epochs)
    run(settings)
    kept = load_state(tmp_path)["loss"]["hardest.scale"]
    assert (kept == 1) == (epochs == 1)
    assert run(attrs.evolve(settings, epochs=3), resume=True).finished


@pytest.mark.usefixtures("_forget")
def test_a_model_of_an_installed_package_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "itm_fast.models", "tiny", PLUGIN_MODEL)
    assert "tiny" in models.names()
    assert "plugin_of_tiny" not in sys.modules
    model = models.create("tiny", vocab_size=9, feature_dim=4, embed_dim=6, word_dim=3)
    assert type(model).__module__ == "plugin_of_tiny"
    model.save(tmp_path / "saved")
    assert type(models.load(tmp_path / "saved")) is type(model)


@pytest.mark.usefixtures("_forget")
def test_a_broken_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "itm_fast.losses", "broken", "import not_there_at_all")
    with (
        pytest.warns(UserWarning, match=r"^itm_fast.losses: 'broken' of the package plugin_of_broken cannot be import"),
        pytest.raises(ValueError, match=r"^loss: unknown loss 'broken'"),
    ):
        registry.find("broken")


def test_an_option_on_the_command_line_of_no_parameter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = "loss_options: unknown option of triplet 'gamma': known are directions"
    arguments = ("train", "--data", tmp_path, "--out", tmp_path / "run", "--loss-option", "gamma=2")
    assert error(capsys, *arguments) == (1, message)
    assert error(capsys, *arguments[:-1], "gamma") == (1, "--loss-option: expected NAME=VALUE, got 'gamma'")
