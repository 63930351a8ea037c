"""The settings of a training run, in YAML and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from itm_fast import models
from itm_fast.config import build, fields_of, from_text, to_dict
from itm_fast.training import TrainConfig
from itm_fast.training.config import read_yaml, to_yaml
from python_tests.helpers.runs import OPTIONS, config, run


def test_settings_survive_yaml(tmp_path: Path) -> None:
    settings = TrainConfig(data="d", out="o", lr=3e-4, validation_images=7, model_options={"direction": "i2t"})
    (tmp_path / "train.yaml").write_text(to_yaml(settings))
    assert build(TrainConfig, read_yaml(tmp_path / "train.yaml")) == settings


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: d\nout: o\nlr: 2e-4\nepochs: 3\n")
    settings = build(TrainConfig, read_yaml(tmp_path / "c.yaml"))
    assert (settings.lr, settings.epochs) == (2e-4, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "c.yaml: unknown setting 'lrr': did you mean 'lr'"),
        ("[1, 2]", "c.yaml: expected a YAML mapping of names to values, got \\[1, 2\\]"),
        ("a: !!python/object/apply:os.system ['true']", "c.yaml: expected YAML of plain values: could not determine"),
        ("a: [", "c.yaml: expected YAML of plain values"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "lr: expected a number above 0, got 0"),
        ({"beta1": 1.0}, "beta1: expected a number at least 0 and below 1, got 1.0"),
        ({"optimizer": "adem"}, r"optimizer: expected one of adam, adamw, got 'adem' \(did you mean 'adam'\?\)"),
        ({"epochs": "many"}, "epochs: expected a whole number, got 'many'"),
        ({"model_options": [1]}, r"model_options: expected names and values, got \[1\]"),
        ({"epoch": 1}, "unknown setting 'epoch': did you mean 'epochs'"),
    ],
)
def test_bad_settings_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(TrainConfig, {"data": "d", "out": "o", **values})


def test_required_settings_are_named() -> None:
    with pytest.raises(ValueError, match="out: this setting is required"):
        build(TrainConfig, {"data": "d"})


def test_every_setting_has_a_help_text() -> None:
    for cls in (TrainConfig, models.SCANConfig):
        for name, field in fields_of(cls).items():
            assert field.metadata["help"].endswith("."), name


def test_values_from_the_command_line() -> None:
    assert [from_text(text) for text in ("3", "0.5", "true", "null", "i2t", "[1]", "a: b", "'")] == [
        3, 0.5, True, None, "i2t", "[1]", "a: b", "'",
    ]  # fmt: skip


def test_train_yaml_holds_the_settings(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    assert build(TrainConfig, read_yaml(tmp_path / "run" / "train.yaml")) == settings.resolved()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["embed_dim"] == 16
    assert to_dict(settings)["model_options"] == OPTIONS


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (1, {}),
        (1, {"scenario": "mss"}),
        (1, {"scenario": "oas", "anchor": "run", "anchor_start": False}),
        (0, {"scenario": "oas", "anchor": "run"}),
        (0, {"epochs": 1}),
        (0, {"mining": "all"}),
        (0, {"mining": "selective"}),
        (0, {"loss": "cmpm", "mining": "all"}),
        (0, {"warmup_epochs": 0}),
        (3, {"warmup_epochs": 3}),
    ],
)
def test_hardest_negatives_wait_for_an_epoch_of_all_negatives(expected: int, changes: dict[str, Any]) -> None:
    settings = TrainConfig(data="d", out="o", **changes)
    assert settings.resolved().warmup_epochs == expected
    # A recorded configuration is read back unchanged.
    assert TrainConfig(**to_dict(settings)) == settings
    assert TrainConfig(**to_dict(settings.resolved())) == settings.resolved()


@pytest.mark.parametrize("loss", ["clipped_sct", "polynomial", "infonce", "triplet"])
def test_another_loss_has_its_own_default_negatives_and_warm_up(loss: str) -> None:
    first = TrainConfig(data="d", out="o", loss=loss)
    for other in ("clipped_sct", "polynomial", "infonce", "triplet"):
        changed = attrs.evolve(first, loss=other).resolved()
        assert changed == TrainConfig(data="d", out="o", loss=other).resolved()
    kept = attrs.evolve(first, loss="triplet", mining="all", warmup_epochs=2)
    assert (kept.mining, kept.resolved().mining, kept.resolved().warmup_epochs) == ("all", "all", 2)
    with pytest.raises(ValueError, match=r"^mining: the loss polynomial takes hardest, got 'all'$"):
        attrs.evolve(kept, loss="polynomial")
    assert attrs.evolve(first, loss="triplet", epochs=1).resolved().warmup_epochs == 0
