"""Names of the previous release still work: options, configuration files, saved runs and arguments."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import yaml

import itm_fast.functional as F_itm
from itm_fast import cli
from itm_fast.config import with_present_names
from itm_fast.losses import TripletLoss
from itm_fast.training import TrainConfig
from itm_fast.training.config import read_yaml
from itm_fast.training.run_folder import saved_config
from python_tests.helpers.commands import SMALL, error, train_small


def note(old: str, new: str) -> str:
    return f"{old} is now {new}; the old name will be removed in the next release"


def notes(caught: list[warnings.WarningMessage]) -> list[str]:
    return sorted(str(one.message) for one in caught if one.category is FutureWarning)


def test_old_options_work_with_a_note(data: Path, tmp_path: Path) -> None:
    common = ["train", "--data", str(data), *SMALL]
    old = ["--scenario", "mss", "--momentum", "0.9", "--regulator", "rar", "--steps", "1"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cli.run([*common, "--out", str(tmp_path / "mss"), *old]) == 0
        assert cli.run([*common, "--out", str(tmp_path / "sct"), "--mining", "contrastive"]) == 0
        fdf = ["--conversions", "1", "--conversion", "adapter"]
        assert cli.run([*common, "--out", str(tmp_path / "fdf"), *fdf]) == 0
    assert notes(caught) == sorted(
        [
            note("--momentum", "--ema-decay"),
            note("--steps", "--regulator-steps"),
            note("--mining contrastive", "--mining sct"),
            note("--conversion", "--conversion-layer"),
        ]
    )
    mss, sct, fdf_run = (saved_config(tmp_path / name) for name in ("mss", "sct", "fdf"))
    assert (mss.ema_decay, mss.model_options["steps"], sct.mining) == (0.9, 1, "sct")
    assert (fdf_run.conversions, fdf_run.conversion_layer) == (1, "adapter")


def test_the_note_is_one_line_on_stderr(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path / "run"), "--momentum", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
    assert ended.value.code == 1
    assert capfd.readouterr().err.splitlines() == [
        f"itm-fast: warning: {note('--momentum', '--ema-decay')}",
        "itm-fast: error: ema_decay: expected a number at least 0 and at most 1, got 2.0",
    ]


def test_an_option_under_both_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--data", tmp_path, "--out", tmp_path / "run", "--momentum", "0.9", "--ema-decay", "0.8"]
    assert error(capsys, *arguments) == (1, "--momentum: the former name of --ema-decay; give the new name alone")
    arguments = ["train", "--data", tmp_path, "--out", tmp_path / "run", "--steps", "1", "--regulator-steps", "2"]
    assert error(capsys, *arguments) == (1, "--steps: the former name of --regulator-steps; give the new name alone")


def test_old_names_in_a_file_work_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    old = {"scenario": "mss", "momentum": 0.9, "mining": "contrastive", "conversion": "ffn", "bert_lr_factor": 0.5}
    file.write_text(yaml.safe_dump(old))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = read_yaml(file)
    new = {"ema_decay": 0.9, "mining": "sct", "conversion_layer": "ffn", "text_lr_factor": 0.5}
    assert values == {"scenario": "mss", **new}
    renamed = [("momentum", "ema_decay"), ("mining contrastive", "mining sct"), ("conversion", "conversion_layer"),
               ("bert_lr_factor", "text_lr_factor")]  # fmt: skip
    assert notes(caught) == sorted(note(*names) for names in renamed)
    file.write_text(yaml.safe_dump({"momentum": 0.9, "ema_decay": 0.9}))
    with pytest.warns(FutureWarning, match="momentum is now ema_decay"):
        assert read_yaml(file) == {"ema_decay": 0.9}
    file.write_text(yaml.safe_dump({"momentum": 0.9, "ema_decay": 0.8}))
    with pytest.raises(ValueError, match=r"old\.yaml: momentum: the former name of ema_decay; give the new name alone"):
        read_yaml(file)


def test_a_run_of_the_release_before_is_continued_without_a_note(data: Path, tmp_path: Path) -> None:
    run = train_small(data, tmp_path / "run", "--scenario", "mss", "--ema-decay", "0.9", "--mining", "sct")
    settings = yaml.safe_load((run / "train.yaml").read_text())
    now = {"momentum": settings.pop("ema_decay"), "conversion": settings.pop("conversion_layer")}
    (run / "train.yaml").write_text(yaml.safe_dump({**settings, **now, "mining": "contrastive"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert cli.run(["train", "--out", str(run), "--resume", "--epochs", "2"]) == 0
    settings = yaml.safe_load((run / "train.yaml").read_text())
    assert (settings["ema_decay"], settings["mining"], settings["epochs"]) == (0.9, "sct", 2)
    assert "momentum" not in settings


def test_quietly_upgraded_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = with_present_names(TrainConfig, {"momentum": 0.5, "mining": "contrastive", "x": [1]}, quiet=True)
    assert found == {"ema_decay": 0.5, "mining": "sct", "x": [1]}


def test_arguments_of_the_losses_and_settings() -> None:
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    message = "^mining 'contrastive' is now 'sct'; the old name will be removed in the next release$"
    with pytest.warns(FutureWarning, match=message):
        old = F_itm.triplet_loss(scores, mining="contrastive")
    assert old == F_itm.triplet_loss(scores, mining="sct") != F_itm.triplet_loss(scores, mining="hardest")
    with pytest.warns(FutureWarning, match=message):
        module = TripletLoss(mining="contrastive")
    assert (module.mining, module(scores)) == ("sct", old)
    with pytest.warns(FutureWarning, match=r"^contrastive is now sct; "):
        assert TrainConfig(data="d", out="o", mining="contrastive").mining == "sct"
    with pytest.warns(FutureWarning, match=r"^momentum is now ema_decay; ") as caught:
        old = TrainConfig(data="d", out="o", scenario="mss", momentum=0.5)  # type: ignore[call-arg]
    assert (old, caught[0].filename) == (TrainConfig(data="d", out="o", scenario="mss", ema_decay=0.5), __file__)
    with pytest.raises(ValueError, match=r"^momentum: the former name of ema_decay; give the new name alone$"):
        TrainConfig(data="d", out="o", scenario="mss", momentum=0.5, ema_decay=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        TrainConfig(data="d", out="o", momentun=0.5)  # type: ignore[call-arg]
