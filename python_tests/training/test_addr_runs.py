"""Whole runs of ADDR: ablations, bit-exact resume in both phases, and rejected settings."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file

from itm_fast import cli, models
from itm_fast.data import placement
from itm_fast.training import TrainConfig, train
from itm_fast.training.addr import discriminators as store
from itm_fast.training.checkpoint import load_state, save_state
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.runs import OPTIONS, config, differences, run, same, stop_at, weights, what_a_run_leaves
from python_tests.training.kills import Calls, start, was_killed

# Batch normalisation, dropout and text augmentation: buffers and random states.
DRAWING = {"model_options": {**OPTIONS, "image_encoder": "residual", "word_dropout": 0.3}, "text_augmentation": 0.2}
SNAPSHOT = "last/discriminators-8.safetensors"


def settings_of(data: Path, out: Path, **changes: object) -> TrainConfig:
    """Return settings with two epochs of four discriminator steps and four model steps."""
    return config(data, out, **{"scenario": "addr", "beta1": 0.5, **DRAWING, **changes})


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (2, {}),
        (6, {"discriminators_on_disk": True}),
        (11, {"discriminator_precision": "low"}),
        (7, {"alternation": "step"}),
        (8, {"alternation": "step", "addr": "united"}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, changes: dict
) -> None:
    """The resumed run equals the uninterrupted one bit for bit: state, discriminators, log and saved model."""
    settings = settings_of(data, tmp_path / "whole", log_every=3, **changes)
    assert run(settings).steps == 16
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, wanted)
        assert run(parts).steps == wanted
    torch.manual_seed(99)
    result = run(parts, resume=True)
    assert (result.steps, result.finished) == (16, True)
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    snapshots = [path.name for path in (tmp_path / "parts" / "last").glob("*.safetensors")]
    assert snapshots == [Path(SNAPSHOT).name]
    rows = load_file(tmp_path / "parts" / SNAPSHOT)
    assert int(rows["steps"].sum()) > 0
    assert rows["weight"].shape == (1 if changes.get("addr") == "united" else 24, 16)
    assert bool(rows["weight"].any(dim=1).all()), "every image was in a batch"


def test_lines_of_discriminator_steps_name_their_own_loss_and_rate(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("itm_fast.training.trainer._LINE_SECONDS", 0.0)
    train(settings_of(data, tmp_path, log_every=1), progress=True)
    said = capfd.readouterr()
    lines = re.findall(r"^epoch \d/2, step \d+/16: (.*), \d+ pairs/s", said.out + said.err, re.MULTILINE)
    forms = {
        "discriminators": r"loss of the discriminators [\d.e-]+, their lr [\d.e-]+",
        "model": r"loss [\d.e+-]+, lr [\d.e-]+",
    }
    found = [name for line in lines for name, form in forms.items() if re.fullmatch(form, line)]
    assert found == (["discriminators"] * 4 + ["model"] * 4) * 2


def test_a_run_that_is_killed_ends_like_one_that_is_left_alone(data: Path, tmp_path: Path) -> None:
    """SIGKILL early and late in saves, which write two files: the discriminators and the state."""

    def settings(out: str) -> TrainConfig:
        return settings_of(data, tmp_path / out, epochs=1, save_every=3)

    assert not was_killed(start(settings("whole"), Calls(), tmp_path / "calls.json"))
    calls = json.loads((tmp_path / "calls.json").read_text())
    for place, share in (("anywhere", 0.4), ("save", 0.3), ("anywhere", 0.3)):
        assert was_killed(start(settings("parts"), Calls(place, round(share * calls[place]))))
    assert not was_killed(start(settings("parts"), Calls()))
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


def test_a_kill_between_both_files_of_a_save(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous state keeps its discriminators. Files of the interrupted save are removed later."""
    settings = settings_of(data, tmp_path / "whole", epochs=1, save_every=2)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        from itm_fast.training import checkpoint

        save = checkpoint.save_state

        def failing(folder: str, state: dict) -> None:
            if state["position"] == 4:
                raise RuntimeError("power cut")
            save(folder, state)

        patch.setattr(checkpoint, "save_state", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            run(parts)
    last = tmp_path / "parts" / "last"
    assert sorted(path.name for path in last.glob("d*")) == [f"discriminators-{n}.safetensors" for n in (2, 4)]
    (last / ".discriminators-4.abcdefgh.tmp.safetensors").write_bytes(b"half")
    run(parts, resume=True)
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


def test_a_full_disk_loses_only_the_steps_since_the_last_save(data: Path, tmp_path: Path) -> None:
    """If the discriminators no longer fit on the disk: one error line, and the run continues once there is space."""
    wide = {"model_options": {"embed_dim": 512, "word_dim": 4, "bidirectional": False}, "text_augmentation": 0.0}
    settings = settings_of(data, tmp_path / "run", epochs=1, addr="full", **wide)
    run(settings)
    state = (tmp_path / "run" / "last" / "checkpoint.pt").read_bytes()
    size = (tmp_path / "run" / "last" / "discriminators-4.safetensors").stat().st_size
    with no_file_above(size - 1), pytest.raises(OSError, match="File too large") as caught:
        run(attrs.evolve(settings, epochs=2), resume=True)
    assert str(caught.value).startswith(f"{tmp_path / 'run' / 'last'}{os.sep}")
    assert (tmp_path / "run" / "last" / "checkpoint.pt").read_bytes() == state
    assert run(attrs.evolve(settings, epochs=2), resume=True).steps == 16


def test_base_is_ordinary_training(data: Path, tmp_path: Path) -> None:
    """Discriminators with zero risk weight change neither the weights nor the data order."""
    plain = {"text_augmentation": 0.0, "log_every": 1}
    run(settings_of(data, tmp_path / "single", scenario="single", **plain))
    assert run(settings_of(data, tmp_path / "base", addr="base", **plain)).steps == 8
    run(settings_of(data, tmp_path / "full", adversarial_weight=0.0, **plain))
    for name in ("base", "full"):
        assert same(weights(tmp_path / "single"), weights(tmp_path / name)), name
    losses = {
        name: [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("single", "base", "full")
    }
    assert losses["single"] == losses["base"] == losses["full"]
    assert "scenario" not in load_state(tmp_path / "base")
    assert not list((tmp_path / "base" / "last").glob("*.safetensors"))


def test_ablations_part_ways(data: Path, tmp_path: Path) -> None:
    """The four ablations give different weights."""
    found = []
    for addr in ("base", "united", "multiple", "full"):
        run(settings_of(data, tmp_path / addr, addr=addr, adversarial_weight=0.5))
        found.append(weights(tmp_path / addr))
    assert not any(same(found[i], found[j]) for i in range(4) for j in range(i))


def test_discriminators_and_model_learn(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log has the numbers of both phases, the discriminators' risk falls, and the model learns to match."""
    out = tmp_path / "run"
    result = run(config(data, out, scenario="addr", addr="multiple", epochs=6, log_every=1, lr=1e-2))
    lines = [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]
    first, second = lines[:4], lines[4:8]
    assert all({"discriminator_loss", "discriminator_lr", "domain_risk"} < line.keys() for line in first)
    assert not any("loss" in line or "lr" in line for line in first)
    assert all({"loss", "lr", "grad_norm", "domain_risk", "discriminator_loss"} < line.keys() for line in second)
    assert {line["discriminator_loss"] for line in second} == {first[-1]["discriminator_loss"]}
    assert [line["epoch"] for line in lines[:9]] == [1] * 8 + [2]
    assert lines[40]["domain_risk"] < 0.9 * lines[0]["domain_risk"]
    assert result.best["rsum"] > 250
    assert cli.run(["curves", str(out), "--out", str(tmp_path / "curves.svg")]) == 0
    assert models.load(out).name == "scan"
    capsys.readouterr()


@pytest.mark.parametrize("model", ["scan", "vsrn"])
def test_bfloat16(data: Path, tmp_path: Path, model: str) -> None:
    settings = settings_of(data, tmp_path / "run", model=model, precision="bfloat16", model_options=OPTIONS)
    assert run(settings).finished
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run").values())


@pytest.mark.parametrize("model", ["bfan", "sgraf", "vsrn", "fdf", "laps", "naaf"])
def test_other_hosts(data: Path, tmp_path: Path, model: str) -> None:
    """A run of both phases leaves an ordinary model."""
    host = {"model": "chan", "conversions": 2, "realignment": False} if model == "fdf" else {"model": model}
    run(settings_of(data, tmp_path / "run", model_options=OPTIONS, epochs=1, **host))
    assert models.load(tmp_path / "run").name == model
    assert load_file(tmp_path / "run" / "last" / "discriminators-4.safetensors")["weight"].shape == (24, 16)


def test_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *SMALL, "--recipe", "addr-scan-f30k"]
    capsys.readouterr()
    options = ["--addr", "multiple", "--adversarial-weight", "0.2", "--discriminator-precision", "low"]
    assert cli.run([*arguments, *options, "--alternation", "step"]) == 0
    assert "scenario: addr, multiple\n" in capsys.readouterr().out
    assert cli.run(["train", "--out", str(tmp_path / "run"), "--resume", "--epochs", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--scenario addr --model vsepp", "scenario: addr needs regions and words, but the model vsepp has none"),
        ("--scenario addr --addr base --model rvsepp", "scenario: addr needs regions and words, but the model "
         "rvsepp has none"),
        ("--scenario addr --conversions 2 --no-realignment --model vse_infty --model-option text_pooling=mean",
         "scenario: addr needs regions and words, but the model vse_infty has none"),
        ("--scenario addr --conversions 2", "scenario: the realignment of conversions takes single, got 'addr'; "
         "--no-realignment trains the fused feature alone"),
        ("--addr full", "addr: 'full' goes with the scenario addr, not single"),
        ("--scenario mss --adversarial-weight 0.2", "adversarial_weight: 0.2 goes with the scenario addr, not mss"),
        ("--model-regularization-weight 0.1",
         "model_regularization_weight: 0.1 goes with the scenario addr, not single"),
        ("--discriminators-on-disk", "discriminators_on_disk: True goes with the scenario addr, not single"),
        ("--scenario addr --addr half", "addr: expected one of base, united, multiple, full, got 'half'"),
        ("--scenario addr --regularization-weight -1",
         "regularization_weight: expected a number at least 0, got -1.0"),
        ("--scenario addr --discriminator-lr 0", "discriminator_lr: expected a number above 0, got 0.0"),
        ("--scenario addr --boosting relative", "boosting: 'relative' goes with the scenario oas or oss or mss, not "
         "addr"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    out = tmp_path / "run"
    status, found = error(capsys, "train", "--data", data, "--out", out, *SMALL, *arguments.split())
    assert (status, found) == (1, message)
    assert not out.exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(settings: TrainConfig, message: str) -> None:
    """Check that a resume is refused with a message containing `message`, and writes nothing."""
    before = contents(Path(settings.out))
    with pytest.raises(ValueError, match=re.escape(message)):
        run(attrs.evolve(settings, epochs=2), resume=True)
    assert contents(Path(settings.out)) == before


def test_discriminators_of_another_run(data: Path, tmp_path: Path) -> None:
    """Reject discriminators of another data set or of other sizes, and missing ones."""
    other = write_concepts(tmp_path / "concepts")
    lines = (other / "train_caps.txt").read_text().splitlines()
    (other / "train_caps.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    settings = settings_of(data, tmp_path / "run", epochs=1)
    run(settings)
    for name, folder, changes in (
        ("data", other, {}),
        ("width", data, {"model_options": {**OPTIONS, "embed_dim": 8}}),
        ("precision", data, {"discriminator_precision": "low"}),
        ("images", data, {"addr": "united"}),
    ):
        theirs = settings_of(folder, tmp_path / name, epochs=1, **changes)
        run(theirs)
        own = shutil.copytree(tmp_path / "run", tmp_path / f"{name} copy")
        path = Path("last") / "discriminators-4.safetensors"
        shutil.copy(tmp_path / name / path, own / path)
        message = f"{own / path}: discriminators of another training: {name} "
        refuses(attrs.evolve(settings, out=str(own)), message)
    (tmp_path / "run" / path).unlink()
    refuses(settings, f"{tmp_path / 'run' / path}: no such file; the discriminators of the run are missing")


def test_a_damaged_state_is_refused(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, tmp_path / "run", epochs=1)
    run(settings)
    for change, message in (
        ({"updates": 3}, "scenario.updates: expected 4, got 3"),
        ({"discriminator_loss": float("nan")}, "scenario.discriminator_loss: expected a finite number, got nan"),
        ({"more": 1}, "scenario: 'more' is unknown"),
    ):
        state = load_state(tmp_path / "run")
        before = dict(state["scenario"])
        state["scenario"].update(change)
        save_state(tmp_path / "run", state)
        refuses(settings, f": the training state is damaged: {message}")
        state["scenario"] = before
        save_state(tmp_path / "run", state)


def test_discriminators_of_others_are_not_overwritten(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / SNAPSHOT
    path.parent.mkdir(parents=True)
    path.write_bytes(b"theirs")
    with pytest.raises(
        ValueError, match=f"run: holds {SNAPSHOT}, which this run would overwrite; choose another --out"
    ):
        run(settings_of(data, tmp_path / "run"))
    assert path.read_bytes() == b"theirs"


@pytest.mark.parametrize("room", [64, None, "enough"])
def test_discriminators_that_memory_has_no_room_for_lie_on_the_disk(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: object
) -> None:
    """The run reports where they are kept and why, and ends bit for bit like a run in memory."""
    total, made, mapped = 64 * 2**30, [], store.mapped
    if room != "enough":
        free = None if room is None else (16 * 2**30 + room, total)
        monkeypatch.setattr(placement, "host_memory", lambda: free)
    monkeypatch.setattr(store, "mapped", lambda folder, root: (made.append(folder), mapped(folder, root))[1])
    settings = settings_of(data, tmp_path / "run", epochs=1)
    assert train(settings).steps == 8
    said = capsys.readouterr().out
    size = {64: "0.00", "enough": "32.00"}.get(room)
    spare = f", {size} GiB to spare in the memory of the host" if size else ""
    where = "disk" if room == 64 else "host"
    assert f"\ndiscriminators: {where} (0.00 GiB of discriminators{spare})\n" in said
    assert made == ([tmp_path / "run" / "last"] if room == 64 else [])
    plain = attrs.evolve(settings, out=str(tmp_path / "plain"))
    monkeypatch.undo()
    run(plain)
    assert differences(what_a_run_leaves(tmp_path / "plain"), what_a_run_leaves(tmp_path / "run")) == []


def test_the_store_may_move_to_disk_and_the_rest_may_not(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, tmp_path / "run", epochs=1)
    run(settings)
    assert run(attrs.evolve(settings, epochs=2, discriminators_on_disk=True), resume=True).steps == 16
    for name, value, shown in (("addr", "multiple", "None, not 'multiple'"), ("alternation", "step", "'epoch'")):
        with pytest.raises(ValueError, match=f"holds a run with {name} = {shown}"):
            run(attrs.evolve(settings, epochs=3, **{name: value}), resume=True)
