"""Whole runs of the training scenarios: their files, bit-exact resume, and rejected settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import attrs
import pytest
import torch

from itm_fast import cli, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.evaluation import evaluate, evaluate_ensemble
from itm_fast.training import TrainConfig, train
from itm_fast.training.checkpoint import load_state, save_state
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.runs import OPTIONS, config, differences, run, same, stop_at, what_a_run_leaves
from python_tests.training.kills import Calls, start, was_killed

# Batch normalisation, dropout and text augmentation: buffers and random states.
DRAWING = {"model_options": {**OPTIONS, "image_encoder": "residual", "word_dropout": 0.3}, "text_augmentation": 0.2}
SCENARIOS: dict[str, dict[str, object]] = {
    "oas": {},
    "oss": {"branches": 3, "boosting": "both"},
    "mss": {"ema_decay": 0.9, "boosting": "relative", "soft": True},
}


@pytest.fixture(scope="module")
def anchor(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model with the words and settings of the runs below."""
    out = tmp_path_factory.mktemp("anchor") / "run"
    run(config(data, out, epochs=1, seed=5, **DRAWING))
    return out


def settings_of(data: Path, out: Path, scenario: str, anchor: Path, **changes: object) -> TrainConfig:
    options = {"anchor": str(anchor)} if scenario == "oas" else {}
    return config(data, out, scenario=scenario, **{**DRAWING, **SCENARIOS[scenario], **options, **changes})


@pytest.mark.parametrize(
    ("scenario", "precision"), [*((name, "float32") for name in SCENARIOS), ("oas", "bfloat16"), ("mss", "bfloat16")]
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anchor: Path, scenario: str, precision: str
) -> None:
    """State, log and saved models are equal bit for bit; only the start of a run needs the frozen anchor."""
    own = shutil.copytree(anchor, tmp_path / "anchor")
    settings = settings_of(data, tmp_path / "whole", scenario, own, precision=precision)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert run(parts).steps == 6
    shutil.rmtree(own)
    torch.manual_seed(99)
    result = run(parts, resume=True)
    assert (result.steps, result.finished) == (8, True)
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    others = load_state(tmp_path / "whole")["scenario"]
    assert list(others) == {"oas": ["anchor"], "oss": ["branches"], "mss": ["anchor"]}[scenario]
    for number in {"oas": (), "oss": (1, 2), "mss": (1,)}[scenario]:
        first, second = (models.load(tmp_path / out / "branches" / str(number)) for out in ("whole", "parts"))
        assert same(first.state_dict(), second.state_dict())


def test_a_model_and_data_from_python_train_beside_an_anchor(data: Path, tmp_path: Path, anchor: Path) -> None:
    """The anchor has the words of the data, so that they can be compared."""
    model = models.load(anchor)
    assert model.tokenizer is not None
    splits = {f"{use}_data": PrecomputedDataset(data, name, model.tokenizer)
              for use, name in (("train", "train"), ("validation", "dev"))}  # fmt: skip
    settings = config(None, tmp_path / "run", scenario="oas", anchor=str(anchor), model_options={}, epochs=1)
    result = train(attrs.evolve(settings, data=None), progress=False, model=model, **splits)
    assert result.finished
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(line["boosting_loss"] > 0 for line in lines)


def test_a_run_that_is_killed_ends_like_one_that_is_left_alone(data: Path, tmp_path: Path, anchor: Path) -> None:
    """SIGKILL in the second save, and late in each of two validations, which write all branches."""

    def settings(out: str) -> TrainConfig:
        return settings_of(data, tmp_path / out, "oss", anchor, branches=2, save_every=3)

    assert not was_killed(start(settings("whole"), Calls(), tmp_path / "calls.json"))
    calls = json.loads((tmp_path / "calls.json").read_text())
    # There are four saves and two validations; an interrupted validation is repeated.
    for place, share in (("save", 0.4), ("validation", 0.45), ("validation", 0.95)):
        assert was_killed(start(settings("parts"), Calls(place, round(share * calls[place]))))
    assert not was_killed(start(settings("parts"), Calls()))
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_a_run_leaves(data: Path, tmp_path: Path, anchor: Path, scenario: str) -> None:
    """Only the target is validated and saved as the model of the run; the other branches are in `branches`."""
    out = tmp_path / "run"
    result = run(settings_of(data, out, scenario, anchor))
    expected = {"oas": [], "oss": ["1", "2"], "mss": ["1"]}[scenario]
    found = sorted(path.name for path in (out / "branches").iterdir()) if expected else []
    assert found == expected
    assert (out / "branches").exists() == bool(expected)
    dev = PrecomputedDataset(data, "dev", Vocabulary.from_file(out / "vocab.json"))
    target = models.load(out)
    assert evaluate(target, dev) == result.best
    lines = [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]
    assert all(0 < line["boosting_loss"] < line["loss"] for line in lines)
    members = [(target, dev)]
    for name in expected:
        folder = out / "branches" / name
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "vocab.json"]
        other = models.load(folder)
        assert not same(other.state_dict(), target.state_dict())
        members.append((other, dev))
    if expected:
        checkpoints = [out, *(out / "branches" / name for name in expected)]
        arguments = [text for folder in checkpoints for text in ("--checkpoint", str(folder))]
        file = tmp_path / "result.json"
        assert cli.run(["evaluate", *arguments, "--data", str(data), "--split", "dev", "--json", str(file)]) == 0
        shown = json.loads(file.read_text())
        assert shown["rsum"] == evaluate_ensemble(members)[1]["rsum"]
        assert shown["members"][0]["rsum"] == result.best["rsum"]


def test_the_best_step_is_that_of_all_branches(data: Path, tmp_path: Path, anchor: Path) -> None:
    """The models in `branches` belong to the target's best step, not to the last one."""
    out = tmp_path / "run"
    settings = settings_of(data, out, "oss", anchor, branches=2, epochs=1)
    run(settings)
    first = models.load(out / "branches" / "1").state_dict()
    state = load_state(out)
    assert same(first, state["scenario"]["branches"][0]["model"])
    # A second epoch that cannot be better keeps the models of the first one.
    state["best"]["rsum"] = 601.0
    save_state(out, state)
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    log = (out / "metrics.jsonl").read_text().splitlines()[:-1]
    (out / "metrics.jsonl").write_text("\n".join([*log, json.dumps({**line, "rsum": 601.0})]) + "\n")
    run(attrs.evolve(settings, epochs=2), resume=True)
    assert not same(load_state(out)["scenario"]["branches"][0]["model"], first)
    assert same(models.load(out / "branches" / "1").state_dict(), first)


def test_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *SMALL, "--model", "dbl"]
    boosting = ["--boosting", "absolute", "--boosting-mining", "all", "--soft", "--boosting-alpha", "0.4"]
    capsys.readouterr()
    assert cli.run([*arguments, "--scenario", "mss", "--ema-decay", "0.9", *boosting]) == 0
    assert "scenario: mss, boosting: absolute (all)\n" in capsys.readouterr().out
    best = tmp_path / "again"
    anchored = ["train", "--data", str(data), "--out", str(best), *SMALL, "--model", "dbl", "--scenario", "oas"]
    assert cli.run([*anchored, "--anchor", str(tmp_path / "run"), "--no-anchor-start"]) == 0
    assert models.load(best).name == "dbl"


def refused(capsys: pytest.CaptureFixture[str], data: Path, out: Path, *arguments: object) -> str:
    status, message = error(capsys, "train", "--data", data, "--out", out, *SMALL, *arguments)
    assert status == 1
    assert not out.exists()
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--scenario oas", "anchor: the scenario oas needs the RUN folder of a trained model: --anchor RUN"),
        ("--scenario teacher", "scenario: expected one of single, oas, oss, mss, addr, aoq, ncr, meta_spn, sam, got "
         "'teacher'"),
        ("--boosting absolute", "boosting: 'absolute' goes with the scenario oas or oss or mss, not single"),
        ("--scenario mss --branches 3", "branches: 3 goes with the scenario oss, not mss"),
        ("--scenario oss --ema-decay 0.9", "ema_decay: 0.9 goes with the scenario mss, not oss"),
        ("--scenario mss --anchor runs/a", "anchor: 'runs/a' goes with the scenario oas, not mss"),
        ("--scenario mss --boosting relative --boosting-alpha 0.3",
         "boosting_alpha: 0.3 goes with the boosting absolute or both, not relative"),
        ("--scenario mss --loss cmpm --mining all --boosting rkd --margin 0.3",
         "margin: 0.3 goes with the loss clipped_sct or polynomial or self_expanding or triplet, not cmpm"),
        ("--scenario mss --boosting rkd --soft", "soft: True goes with the boosting absolute or relative or both, not "
         "rkd"),
        ("--scenario mss --ema-decay 1.01", "ema_decay: expected a number at least 0 and at most 1, got 1.01"),
        ("--scenario mss --ema-decay -0.1", "ema_decay: expected a number at least 0 and at most 1, got -0.1"),
        ("--scenario oss --branches 1", "branches: expected a number at least 2 and at most 64, got 1"),
        ("--scenario mss --boosting-alpha 2", "boosting_alpha: expected a number at least 0 and at most 1, got 2.0"),
        ("--scenario mss --boosting am", "boosting: expected one of absolute, relative, both, soft_rank, rkd, dml, "
         "dino, dino_inverse, got 'am'"),
        ("--scenario oas --anchor nowhere", f"{Path('nowhere') / 'config.json'}: no such file; nowhere is not a saved "
         "model"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert refused(capsys, data, tmp_path / "run", *arguments.split()) == message


def test_an_anchor_of_another_model_or_vocabulary(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    out, oas = tmp_path / "run", ["--scenario", "oas", "--anchor"]
    assert refused(capsys, data, out, *oas, trained, "--model", "vsepp") == (
        f"anchor: {trained} contains the model scan, but this run trains vsepp"
    )
    assert refused(capsys, data, out, *oas, trained, "--model-option", "direction=i2t") == (
        f"anchor: the model in {trained} has direction = 't2i', but 'i2t' is trained"
    )
    assert refused(capsys, data, out, *oas, trained, "--model-option", "embed_dim=8") == (
        f"anchor: the model in {trained} has embed_dim = 16, but 8 is trained"
    )
    other = shutil.copytree(trained, tmp_path / "other")
    words = Vocabulary.from_file(trained / "vocab.json").words
    Vocabulary([*words[:5], *words[:4:-1]]).save(other / "vocab.json")
    file = other / "vocab.json"
    assert refused(capsys, data, out, *oas, other) == (
        f"anchor: {file} differs from the vocabulary of this run; pass --vocab {file}"
    )
    Vocabulary([word for word in words if word != "<mask>"]).save(file)
    assert refused(capsys, data, out, *oas, other, "--vocab", file, "--text-augmentation", 0.2) == (
        f"anchor: {file} has no <mask>, which --text-augmentation needs: train without it, or beside an anchor that "
        "was trained with it"
    )
    file.unlink()
    assert refused(capsys, data, out, *oas, other) == (
        f"anchor: {other} contains no vocab.json; pass the run directory of its training"
    )


@pytest.mark.parametrize(
    ("scenario", "change", "message"),
    [
        ("mss", lambda part: part["anchor"].pop("image_encoder.fc.bias"),
         "scenario.anchor: 'image_encoder.fc.bias' is missing"),
        ("mss", lambda part: part["anchor"]["image_encoder.fc.bias"].fill_(float("nan")),
         "scenario.anchor.image_encoder.fc.bias: row 0 holds values that are not finite"),
        ("mss", lambda part: part.clear(), "scenario: 'anchor' is missing"),
        ("oss", lambda part: part["branches"].pop(), "scenario.branches: expected 2 values, got 1"),
        ("oss", lambda part: part["branches"][1].pop("optimizer"), "scenario.branches.1: 'optimizer' is missing"),
        ("oss", lambda part: part["branches"][0]["optimizer"]["param_groups"][0].update(eps=1.0),
         "scenario.branches.0.optimizer.param_groups.0.eps: expected 1e-08, got 1.0"),
        ("oss", lambda part: part["branches"][0]["model"].update(extra=torch.zeros(1)),
         "scenario.branches.0.model: 'extra' is unknown"),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(
    data: Path, tmp_path: Path, anchor: Path, scenario: str, change: object, message: str
) -> None:
    settings = settings_of(data, tmp_path / "run", scenario, anchor, epochs=1)
    run(settings)
    state = load_state(tmp_path / "run")
    change(state["scenario"])
    save_state(tmp_path / "run", state)
    with pytest.raises(ValueError, match=f": the training state is damaged: {re.escape(message)}$"):
        run(attrs.evolve(settings, epochs=2), resume=True)


def test_a_state_of_another_scenario(data: Path, tmp_path: Path, anchor: Path) -> None:
    settings = settings_of(data, tmp_path / "run", "mss", anchor, epochs=1)
    run(settings)
    with pytest.raises(ValueError, match=r"run: holds a run with scenario = 'mss', not 'oss'; choose another --out"):
        run(settings_of(data, tmp_path / "run", "oss", anchor, epochs=2), resume=True)
    state = load_state(tmp_path / "run")
    del state["scenario"]
    save_state(tmp_path / "run", state)
    with pytest.raises(ValueError, match=r"the training state has no 'scenario': damaged, or of another version"):
        run(attrs.evolve(settings, epochs=2), resume=True)


def test_branches_of_others_are_not_overwritten(data: Path, tmp_path: Path, anchor: Path) -> None:
    (tmp_path / "run" / "branches" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run: holds branches, which this run would overwrite; choose another --out"):
        run(settings_of(data, tmp_path / "run", "oss", anchor, epochs=1))
