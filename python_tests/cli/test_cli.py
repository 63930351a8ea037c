"""The command line: output, files, exit status, and one line for each user error."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml

import itm_fast.functional as F_itm
from itm_fast import __version__, cli, models
from itm_fast.cli import demo as demo_command
from itm_fast.cli.options import default_text
from itm_fast.cli.train import COMMON, train_command
from itm_fast.config import fields_of
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.evaluation import scoring
from itm_fast.report import of_run
from itm_fast.training import TrainConfig
from itm_fast.training.config import GROUPS, read_yaml
from itm_fast.training.loss_rules import MINING
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import SMALL, error, train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.terminal import every_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(data, tmp_path_factory.mktemp("cli") / "run", "--lr", "1e-2", "--epochs", "2")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# Help


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"itm-fast {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = plain(capsys.readouterr().out)
    for command in ("demo", "train", "evaluate", "bench", "data"):
        assert re.search(rf"^\W*{command}\s+[A-Z]", text, re.MULTILINE), command


def test_the_list_of_commands_describes_train_as_its_own_help() -> None:
    listed: Any = typer.main.get_command(cli.app)
    assert listed.commands["train"].help == train_command().help.split("\n\n")[0]


def helped(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert cli.run([*command]) == 0
    return plain(capsys.readouterr().out)


def test_train_help_is_short_and_names_models_and_losses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, "train", "--help")
    assert len(text.splitlines()) < 50
    words = set(re.findall(r"\w+", text))
    assert {*models.names(), "triplet", "polynomial", "cmpm", *MINING} - {"fdf"} <= words
    for name in COMMON:
        assert re.search(rf"^│ --{name.replace('_', '-')} ", text, re.MULTILINE), name


def test_train_help_all_lists_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    text = helped(capsys, "train", "--help-all")
    for name, field in fields_of(TrainConfig).items():
        by_name = name in ("model_options", "loss_options")
        flag = "--" + (name.removesuffix("s") if by_name else name).replace("_", "-")
        assert f"{flag} " in text, flag
        if not by_name:
            assert field.metadata["help"] in text, name
        for choice in field.metadata["choices"] or ():
            assert re.search(rf"^│ {flag} .*\b{choice}\b", text, re.MULTILINE), (name, choice)
    assert "Learning rate. (default 0.0002)" in text
    assert "--no-reweighting turns it off" in text
    titles = re.findall("^╭─ (.*?) ─+╮$", text, re.MULTILINE)
    assert titles == ["Options", *GROUPS]


COMMANDS = [
    [], ["train"], ["demo"], ["recipes"], ["models"], ["evaluate"], ["explain"], ["speech"], ["features"], ["curves"],
    ["realign"], ["convert"], ["bench"], ["score"], ["search"], ["serve"], ["data"], ["index"],
    *(["data", name] for name in ("emoji", "import", "pack", "synthesize", "check")),
    *(["index", name] for name in ("build", "add", "delete", "compact", "relocate", "info", "check")),
]  # fmt: skip


@pytest.mark.parametrize("command", [*COMMANDS, ["train", "--help-all"]], ids=" ".join)
def test_help_cuts_no_name_and_shows_flags_without_a_value(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    for columns in (80, 240):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = helped(capsys, *command, *([] if "--help-all" in command else ["--help"]))
        # Option names start near the border. Names inside help texts stand further right.
        shown[columns] = re.findall(r"^│[ *]{1,5}(--[\w-]+)", text, re.MULTILINE)
        assert "…" not in text
        assert "<bool>" not in text
    assert "--help" in shown[80]
    assert shown[80] == shown[240]


def test_models_lists_the_models_and_the_settings_of_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    rows = [line.split(maxsplit=1) for line in helped(capsys, "models").splitlines()]
    assert [name for name, _ in rows] == models.names()
    assert all(re.fullmatch(r".+ \(.+ et al\., .*\d{4}\)\.", summary.strip()) for _, summary in rows)
    for name in models.names():
        text = helped(capsys, "models", name)
        for setting, field in fields_of(models.config_class(name)).items():
            default = re.escape(default_text(field).removeprefix("default "))
            assert re.search(rf"^{setting} +{default} +{re.escape(field.metadata['help'])}", text, re.MULTILINE), (
                setting
            )
    encoder = fields_of(models.config_class("scan"))["image_encoder"].metadata
    assert all(f"({choice})" in encoder["help"] for choice in encoder["choices"])
    assert error(capsys, "models", "scam") == (1, "unknown model 'scam': did you mean 'scan'?")


# Training


def test_train_writes_the_run_and_says_where(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.run(["train", "--data", str(data), "--out", str(out), *SMALL, "--epochs", "2"]) == 0
    best = max(line["rsum"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "validation")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"best model: {out} (step ")
    assert re.search(rf", rsum {best:.1f} on the validation split\); 8 steps in \d+ s$", last)
    assert read_yaml(out / "train.yaml")["model_options"] == {"embed_dim": 16, "word_dim": 12}


def test_options_override_the_file_and_the_file_the_defaults(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "data": str(data),
                "epochs": 1,
                "lr": 1e-3,
                "batch_size": 60,
                "drop_last": True,
                "model_options": {"embed_dim": 8, "direction": "i2t"},
            }
        )
    )
    out = tmp_path / "run"
    arguments = ["--config", str(file), "--out", str(out), "--lr", "2e-3", "--no-drop-last"]
    assert cli.run(["train", *arguments, "--model-option", "embed_dim=12"]) == 0
    settings = read_yaml(out / "train.yaml")
    assert (settings["lr"], settings["batch_size"], settings["drop_last"], settings["margin"]) == (2e-3, 60, False, 0.2)
    assert settings["model_options"] == {"embed_dim": 12, "direction": "i2t"}
    assert models.load(out).config.direction == "i2t"


def test_resume_needs_nothing_but_the_folder(data: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--out", str(trained), "--resume", "--epochs", "3"]) == 0
    assert "12 steps in" in capsys.readouterr().out
    status, message = error(capsys, "train", "--out", trained, "--resume", "--lr", "0.5")
    assert (status, message) == (
        1, f"{trained}: holds a run with lr = 0.01, not 0.5; choose another --out, or continue the run "
        "with --resume and the same settings",
    )  # fmt: skip


def test_train_errors(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    for arguments, status, message in (
        (["--out", out], 1, "data: this setting is required"),
        (["--data", data], 1, "out: this setting is required"),
        (["--resume"], 1, "out: --resume needs the RUN folder to continue: --out RUN, or out in the --config file"),
        (["--data", data, "--out", out, "--lr", "-1"], 1, "lr: expected a number above 0, got -1.0"),
        (["--data", data, "--out", out, "--lr", "fast"], 2, ", got 'fast'"),
        (["--data", data, "--out", out, "--epoch", "3"], 2, "No such option: --epoch"),
        (["--data", data, "--out", out, "--model", "imram"], 1, "unknown model 'imram': known are bfan"),
        (["--data", data, "--out", out, "--optimizer", "sgd"], 1, "optimizer: expected one of adam, adamw, got 'sgd'"),
        (["--data", data, "--out", out, "--model-option", "x"], 1, "--model-option: expected NAME=VALUE, got 'x'"),
        (["--data", data, "--out", out, "--model-option", "embed_dims=3"], 1,
         "unknown scan setting 'embed_dims': did you mean 'embed_dim'?"),
        (["--data", tmp_path / "no", "--out", out], 1, "no such"),
        (["--config", tmp_path / "no.yaml", "--out", out], 1, f"{tmp_path / 'no.yaml'}: no such configuration file"),
    ):  # fmt: skip
        got, text = error(capsys, "train", *arguments)
        assert (got, message in text) == (status, True), text
    assert not out.exists()


def test_damaged_data_are_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write_concepts(tmp_path / "broken")
    features = np.load(broken / "train_ims.npy")
    features[7, 2, 1] = np.nan
    np.save(broken / "train_ims.npy", features)
    status, message = error(capsys, "train", "--data", broken, "--out", tmp_path / "run", *SMALL, lines=6)
    assert status == 1
    assert f"{broken / 'train_ims.npy'}: row 7 holds values that are not finite" in message

    captions = (broken / "dev_caps.txt").read_text().splitlines()
    (broken / "dev_caps.txt").write_text("\n".join([*captions[:3], "b'a dog'", *captions[4:]]) + "\n")
    status, message = error(capsys, "train", "--data", broken, "--out", tmp_path / "run2", *SMALL)
    assert status == 1
    assert "dev_caps.txt" in message
    assert "line 4" in message


# Evaluation


def test_evaluate_prints_a_table_and_writes_json(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    file = tmp_path / "result.json"
    assert cli.run(["evaluate", "--checkpoint", str(trained), "--data", str(data), "--json", str(file)]) == 0
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    scores = models.load(trained)(dataset.image_batch(range(10)), *dataset.caption_batch(range(50)))
    expected = F_itm.recall_summary(*F_itm.retrieval_ranks(scores, dataset.caption_image))
    result = json.loads(file.read_text())
    assert {key: result[key] for key in expected} == pytest.approx(expected)
    assert (result["split"], result["images"], result["folds"], result["ties"]) == ("test", 10, 1, "pessimistic")
    assert result["torch"] == torch.__version__
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("test, 10 images"))
    order = [f"{side}_{key}" for side in ("i2t", "t2i") for key in ("r1", "r5", "r10", "medr", "meanr")] + ["rsum"]
    own, scores = torch.arange(50) // 5 == torch.arange(10)[:, None], scores.detach()
    distance = float(scores[own].mean() - scores[~own].mean())
    assert result["mean_distance"] == pytest.approx(distance, abs=1e-6)
    assert line.split()[3:] == [*(f"{expected[key]:.1f}" for key in order), f"{distance:.2f}"]


def test_evaluate_in_folds_gives_their_mean(data: Path, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--checkpoint", str(trained), "--data", str(data), "--folds", "5", "--json", str(file)]
    assert cli.run(["evaluate", *arguments]) == 0
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    model = models.load(trained)
    sums = []
    for fold in range(5):
        scores = model(
            dataset.image_batch(range(2 * fold, 2 * fold + 2)), *dataset.caption_batch(range(10 * fold, 10 * fold + 10))
        )
        ranks = F_itm.retrieval_ranks(scores, torch.arange(10) // 5)
        sums.append(F_itm.recall_summary(*ranks)["rsum"])
    assert json.loads(file.read_text())["rsum"] == pytest.approx(sum(sums) / 5)


def test_evaluate_errors(data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "vocab.json"
    Vocabulary.build(["one two three"], 1).save(other)
    for arguments, status, message in (
        (["--data", data], 2, "Missing option '--checkpoint'"),
        (["--checkpoint", tmp_path, "--data", data], 1, f"{tmp_path / 'config.json'}: no such file"),
        (["--checkpoint", trained, "--data", data, "--split", "val"], 1, "val_ims.npy: no such file"),
        (["--checkpoint", trained, "--data", data, "--folds", "3"], 1,
         "folds: expected a divisor of the number of images, 10, got 3"),
        (["--checkpoint", trained, "--data", data, "--vocab", other], 1, "vocab.json: 8 words, but the model in"),
        (["--checkpoint", trained, "--data", data, "--device", "tpu"], 1, "device: expected a device such as cpu"),
    ):  # fmt: skip
        got, text = error(capsys, "evaluate", *arguments)
        assert (got, message in text) == (status, True), text


# The process


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "itm_fast", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_exit_status_and_no_traceback(tmp_path: Path) -> None:
    user_error = process("train", "--data", tmp_path / "no", "--out", tmp_path / "run")
    assert user_error.returncode == 1
    assert re.fullmatch(r"itm-fast: error: .*no.*: no such .*\n", user_error.stderr)
    usage_error = process("evaluate", "--nope")
    assert (usage_error.returncode, usage_error.stderr.count("\n")) == (2, 1)


def run_with_a_closed_stdout(*arguments: object) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "itm_fast", *map(str, arguments)]
        subprocess.run(command, stdout=writing, stderr=subprocess.DEVNULL, cwd=ROOT, check=False)
    finally:
        os.close(writing)


def test_results_are_written_even_if_nobody_reads_the_tables(data: Path, trained: Path, tmp_path: Path) -> None:
    run_with_a_closed_stdout("evaluate", "--checkpoint", trained, "--data", data, "--json", tmp_path / "e.json")
    assert json.loads((tmp_path / "e.json").read_text())["images"] == 10
    np.save(tmp_path / "scores.npy", np.eye(12).repeat(5, 1))
    run_with_a_closed_stdout(
        "score", tmp_path / "scores.npy", "--json", tmp_path / "s.json", "--rankings", tmp_path / "s.npz",
        "--report", tmp_path / "s.html",
    )  # fmt: skip
    assert json.loads((tmp_path / "s.json").read_text())["protocols"]["full"]["rsum"] == 600.0
    assert (tmp_path / "s.npz").exists()
    assert (tmp_path / "s.html").exists()


# The demo


def test_demo_trains_evaluates_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command runs on twenty pictures, which serve as all three splits, so that few steps suffice."""

    def write_part(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for split in emoji.SPLITS:
            np.save(directory / f"{split}_ims.npy", emoji.patches(emoji.pictures("test")[:20]))
            (directory / f"{split}_caps.txt").write_text("\n".join(emoji.captions("test")[:100]) + "\n")

    monkeypatch.setattr(emoji, "write_dataset", write_part)
    options = {**demo_command.SETTINGS["model_options"], "embed_dim": 32}
    changes = {"model_options": options, "epochs": 10, "batch_size": 50}
    monkeypatch.setattr(demo_command, "SETTINGS", {**demo_command.SETTINGS, **changes})
    out = tmp_path / "demo"
    with monkeypatch.context() as patch:
        terminal = every_step(patch, scoring)
        for _ in range(2):  # The second demo replaces the first.
            assert cli.run(["demo", "--out", str(out), "--seed", "1", "--json", str(tmp_path / "demo.json")]) == 0
    for evaluated in ("test, untrained", "dev", "test"):  # One tile each: images, captions, scores.
        assert re.search(rf"\r{evaluated}: 100%[^\r]* 3/3 ", terminal.getvalue()), evaluated
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if line.startswith(("trained", "untrained"))]
    assert len(lines) == 4
    assert lines[:2] == lines[2:], "the same seed gives the same numbers"
    assert float(lines[0][-2]) > float(lines[1][-2]) + 20
    assert float(lines[0][-1]) > float(lines[1][-1]), "the mean distance"
    assert f"report: {out / 'report.html'}" in text

    test_line = read_metrics(out / "metrics.jsonl")[-1]
    assert (test_line["kind"], f"{test_line['rsum']:.1f}") == ("test", lines[0][-2])
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["trained"]["rsum"] == test_line["rsum"]
    assert f"{result['untrained']['rsum']:.1f}" == lines[1][-2]
    assert result["environment"]["threads"] == torch.get_num_threads()
    html = (out / "report.html").read_text(encoding="utf-8")
    assert f"<b>{test_line['rsum']:.1f}</b>" in html
    assert html.count('<article class="card pair">') == of_run.QUERIES
    # Loss, recalls, gradient norm of the first image layer; gap and distance of the hardest negatives; cosines.
    assert html.count("<svg ") == 6

    # The share of anchors with hardest negatives is only drawn for selective mining.
    share = "Anchors that took their hardest negative"
    assert share not in html
    assert cli.run(["demo", "--out", str(out), "--seed", "1", "--mining", "selective"]) == 0
    html = (out / "report.html").read_text(encoding="utf-8")
    assert share in html
    assert html.count("<svg ") == 7

    for option, value, said in (
        ("--minutes", "0", "minutes: expected a finite number above 0, got 0"),
        ("--mining", "easy", "mining: expected one of hardest, all, selective, semi_hard, sct, got 'easy'"),
    ):
        assert error(capsys, "demo", "--out", out, option, value) == (1, said)


def test_demo_plans_fewer_epochs_on_a_slow_machine(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from itm_fast.training import Trainer

    monkeypatch.setattr(Trainer, "seconds_per_step", lambda _self, mining: {"hardest": 3.0, "all": 6.0}[mining])
    config = TrainConfig(
        data=str(data), out=str(tmp_path), epochs=24, batch_size=32, warmup_epochs=2, model_options={"embed_dim": 8}
    )
    # Four steps per epoch, and 10 % for validation: two epochs of 26.4 seconds, the others of 13.2 seconds.
    fitting = {
        seconds: demo_command._fit_into(config, seconds / 60).epochs for seconds in (1, 52, 53, 105, 106, 343, 344)
    }
    assert fitting == {1: 1, 52: 1, 53: 2, 105: 5, 106: 6, 343: 23, 344: 24}
    assert demo_command._fit_into(config, 60.0) == config


def test_time_per_step_is_measured_with_the_negatives_asked_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is measured with the given negatives, even if the first epochs are a warm-up with all negatives."""
    from itm_fast.training import Trainer
    from itm_fast.training.run import create_model, load_data

    config = TrainConfig(
        data=str(data), out=str(tmp_path), batch_size=32, warmup_epochs=1, model_options={"embed_dim": 8}
    )
    vocabulary, train_data, dev_data = load_data(config)
    trainer = Trainer(config, create_model(config, vocabulary, train_data), train_data, dev_data, progress=False)
    calls = {}
    for mining, loss in trainer.stepper.losses.items():
        calls[mining] = []
        loss.register_forward_hook(lambda *_args, called=calls[mining]: called.append(1))
    assert trainer.seconds_per_step("hardest") > 0
    assert {mining: len(called) for mining, called in calls.items()} == {"all": 0, "hardest": 7}
    assert trainer.seconds_per_step("all", steps=2) > 0
    assert {mining: len(called) for mining, called in calls.items()} == {"all": 4, "hardest": 7}


def test_commands_may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        wanted = 65536 if before[1] == resource.RLIM_INFINITY else min(before[1], 65536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_demo_leaves_other_runs_alone(data: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = error(capsys, "demo", "--out", trained)
    assert (status, message) == (1, f"{trained}: contains a run that is not a demo; choose another --out")
    assert (trained / "model.safetensors").exists()
