"""A damaged training state is rejected with the name of the entry, before any step and without writing."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from itm_fast import cli
from itm_fast.training.checkpoint import load_state, save_state
from python_tests.helpers.commands import error
from python_tests.helpers.runs import OPTIONS, config, make_trainer
from python_tests.helpers.runs import run as train

DAMAGED = "the training state is damaged: "
FOREIGN = "not a readable training state: names the Python object {}, which is not allowed; no code was run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a trained run, to be damaged by a test."""
    return shutil.copytree(trained, tmp_path / "run")


def resume_error(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, message = error(capsys, "train", "--out", run, "--resume", "--epochs", "2")
    assert status == 1
    assert {path: path.read_bytes() for path in before} == before
    return message


def refused(capsys: pytest.CaptureFixture[str], run: Path, change: Callable[[dict], object]) -> str:
    path = run / "last" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    message = resume_error(capsys, run)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "4"}, "'position' is '4'"),
        ({"position": -1}, "'position' is -1"),
        ({"position": True}, "'position' is True"),
        ({"log_size": None}, "'log_size' is None"),
        ({"log_size": 10**30}, "'log_size' is 1000000000000000000000000000000"),
        ({"seconds": math.inf}, "'seconds' is inf"),
        ({"seconds": math.nan}, "'seconds' is nan"),
        ({"optimizer": []}, "'optimizer' is []"),
        ({"random": torch.zeros(3)}, "'random' is <Tensor>"),
        ({"best": "x" * 999}, f"'best' is '{'x' * 59}... (1001 characters)"),
        ({"best": {"rsum": "x"}}, "best: expected finite numbers by name, got {'rsum': 'x'}"),
        ({"best": {"rsum": math.nan}}, "best: expected finite numbers by name, got {'rsum': nan}"),
        ({"best": {"rsum": True}}, "best: expected finite numbers by name, got {'rsum': True}"),
        ({"best": {1: 2.0}}, "best: expected finite numbers by name, got {1: 2.0}"),
        ({"best": {"i2t_r1": 50.0}}, "best: 'rsum' is missing"),
        ({"best_step": 9}, "best_step: expected at most the position, 4, got 9"),
        ({"validated_step": 5}, "validated_step: expected at most the position, 4, got 5"),
        ({"window": ["x"]}, "window.0: expected a finite number, got 'x'"),
        ({"window": [0.5, math.nan]}, "window.1: expected a finite number, got nan"),
    ],
)
def test_values_of_another_kind(
    run: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    assert refused(capsys, run, lambda state: state.update(changes)) == DAMAGED + message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.clear(), "the weight image_encoder.fc.weight is missing"),
        (lambda model: model.update({"image_encoder.fc.weight": 3}),
         "image_encoder.fc.weight: expected a tensor, got int"),
        (lambda model: model.update(fc=torch.zeros(1)), "the weight fc is unknown to the model"),
        (lambda model: model.update({7: torch.zeros(1)}), "expected names of weights as strings, got 7"),
        (lambda model: model["text_encoder.embed.weight"][2, 1].fill_(math.nan),
         "text_encoder.embed.weight: row 2 holds values that are not finite"),
        (lambda model: model.update({"image_encoder.fc.bias": torch.zeros(16, dtype=torch.int64)}),
         "image_encoder.fc.bias: expected floating point values, got torch.int64"),
        (lambda model: model.update({"image_encoder.fc.bias": torch.zeros(16).to_sparse()}),
         FOREIGN.format("torch._utils._rebuild_sparse_tensor")),
        (lambda model: model.update({"image_encoder.fc.bias": torch.zeros(16, device="meta")}),
         FOREIGN.format("torch._utils._rebuild_meta_tensor_no_storage")),
        (lambda model: model.update({"image_encoder.fc.bias": torch.zeros(16, dtype=torch.float16)}),
         DAMAGED + "model.image_encoder.fc.bias: expected dtype torch.float32, got torch.float16"),
    ],
)  # fmt: skip
def test_weights(run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict], object], message: str) -> None:
    assert refused(capsys, run, lambda state: change(state["model"])) == message


def group(**changes: object) -> Callable[[dict], object]:
    """Return a function that changes the optimiser's settings."""
    return lambda state: state["optimizer"]["param_groups"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["optimizer"].clear(), "optimizer: 'state' is missing"),
        (lambda state: state["optimizer"].update(param_groups=[]),
         "optimizer.param_groups: expected 1 values, got 0"),
        (lambda state: state["optimizer"]["param_groups"][0].pop("eps"),
         "optimizer.param_groups.0: 'eps' is missing"),
        (group(more=1), "optimizer.param_groups.0: 'more' is unknown"),
        (group(amsgrad=True), "optimizer.param_groups.0.amsgrad: expected False, got True"),
        (group(betas="x"), "optimizer.param_groups.0.betas: expected a value of type tuple, got 'x'"),
        (group(betas=(0.9, 0.9)), "optimizer.param_groups.0.betas: expected (0.9, 0.999), got (0.9, 0.9)"),
        (group(lr=math.nan), "optimizer.param_groups.0.lr: expected a finite number, got nan"),
        (group(lr=torch.tensor(0.1)), "optimizer.param_groups.0.lr: expected a finite number, got <Tensor>"),
        (group(params=[0]), "optimizer.param_groups.0.params: expected 11 values, got 1"),
        (lambda state: state["scheduler"].clear(), "scheduler: 'base_lrs' is missing"),
        (lambda state: state["scheduler"].update(last_epoch="x"),
         "scheduler.last_epoch: expected a value of type int, got 'x'"),
        (lambda state: state["scheduler"].update(last_epoch=3), "scheduler.last_epoch: expected 4, got 3"),
        (lambda state: state["scheduler"].update(base_lrs=[0.5]), "scheduler.base_lrs: expected [0.0002], got [0.5]"),
        (lambda state: state["scheduler"].update(step=3), "scheduler: 'step' is unknown"),
        (lambda state: state["plateau"].update(steps_on_plateau=[]),
         "plateau.steps_on_plateau: expected a value of type int, got []"),
        (lambda state: state["plateau"].update(warned=1), "plateau.warned: expected a value of type bool, got 1"),
        (lambda state: state["gradients"].clear(), "gradients: 'warned' is missing"),
        (lambda state: state["random"].clear(), "random.cpu: expected a tensor, got None"),
        (lambda state: state["random"].update(cpu=torch.zeros(8, dtype=torch.uint8)),
         f"random.cpu: expected shape ({len(torch.get_rng_state())},), got (8,)"),
        (lambda state: state["random"]["cpu"].fill_(255),
         "the state of the random numbers does not fit (RuntimeError)"),
    ],
)  # fmt: skip
def test_parts(run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict], object], message: str) -> None:
    assert refused(capsys, run, change) == DAMAGED + message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.clear(), ": 0 is missing"),
        (lambda state: state.pop(3), ": 3 is missing"),
        (lambda state: state.update({99: {}}), ": 99 is unknown"),
        (lambda state: state.update({0: 3}), ".0: expected names and values, got 3"),
        (lambda state: state[0].pop("exp_avg"), ".0: 'exp_avg' is missing"),
        (lambda state: state[0].update(step="x"), ".0.step: expected a tensor, got 'x'"),
        (lambda state: state[0].update(step=torch.zeros(0)), ".0.step: expected shape (), got (0,)"),
        (lambda state: state[0].update(step=torch.tensor(math.nan)), ".0.step: holds values that are not finite"),
        (lambda state: state[0].update(step=torch.tensor(0.0)), ".0.step: expected 1 to 4, got 0"),
        (lambda state: state[0].update(step=torch.tensor(5.0)), ".0.step: expected 1 to 4, got 5"),
        (lambda state: state[0].update(step=torch.tensor(1.5)), ".0.step: expected 1 to 4, got 1.5"),
        (lambda state: state[0].update(exp_avg=torch.zeros(1)), ".0.exp_avg: expected shape (16, 8), got (1,)"),
        (lambda state: state[0]["exp_avg"][5].fill_(math.nan), ".0.exp_avg: row 5 holds values that are not finite"),
        (lambda state: state[0].update(exp_avg_sq=torch.zeros(1).expand(16, 8)),
         ".0.exp_avg_sq: expected values with strides (8, 1), got (0, 0)"),
        (lambda state: state[0].update(exp_avg_sq=torch.zeros(128)),
         ".0.exp_avg_sq: expected shape (16, 8), got (128,)"),
        (lambda state: state[0].update(exp_avg_sq=torch.zeros(16, 8).double()),
         ".0.exp_avg_sq: expected dtype torch.float32, got torch.float64"),
    ],
)  # fmt: skip
def test_moments(run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict], object], message: str) -> None:
    expected = f"{DAMAGED}optimizer.state{message}"
    assert refused(capsys, run, lambda state: change(state["optimizer"]["state"])) == expected


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"rsum": "x"}, "expected finite numbers by name, got {'rsum': 'x'}"),
        ({"i2t_r1": 3.0}, "'rsum' is missing"),
    ],
)
def test_a_damaged_validation_in_the_log(
    run: Path, capsys: pytest.CaptureFixture[str], summary: dict[str, object], message: str
) -> None:
    log, state = run / "metrics.jsonl", torch.load(run / "last" / "checkpoint.pt", weights_only=True)
    line = {"kind": "validation", "split": "dev", "step": 4, "epoch": 1, "seconds": 1.0, **summary}
    log.write_bytes(log.read_bytes()[: state["log_size"]] + json.dumps(line).encode() + b"\n")
    assert resume_error(capsys, run) == f"{log}: the validation after step 4: {message}"


def test_log_lines_that_are_no_validation_are_made_again(run: Path) -> None:
    """If invalid lines follow the state's position in the log, the validation is repeated."""
    state = torch.load(run / "last" / "checkpoint.pt", weights_only=True)
    log = run / "metrics.jsonl"
    for rubbish in (b"[1]\n", b"[" * 100_000 + b"\n"):
        copy = shutil.copytree(run, run.parent / f"copy{len(rubbish)}")
        (copy / "metrics.jsonl").write_bytes(log.read_bytes()[: state["log_size"]] + rubbish)
        assert cli.run(["train", "--out", str(copy), "--resume", "--epochs", "2"]) == 0
        kinds = Counter(json.loads(line)["kind"] for line in (copy / "metrics.jsonl").read_text().splitlines())
        assert kinds["validation"] == 2


def test_a_log_shorter_than_the_state_says_is_kept(run: Path) -> None:
    """No file system accepts the position 2**52."""
    path, log = run / "last" / "checkpoint.pt", (run / "metrics.jsonl").read_bytes()
    torch.save({**torch.load(path, weights_only=True), "log_size": 2**52}, path)
    assert cli.run(["train", "--out", str(run), "--resume", "--epochs", "2"]) == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(log)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"optimizer": "adamw", "weight_decay": 0.1, "grad_clip": 0}, {"num_layers": 2}),
        ({"lr_schedule": "cosine", "lr_warmup_steps": 3}, {"image_encoder": "residual"}),
        ({"model": "vsepp"}, {"image_encoder": "projected_residual"}),
        ({"model": "vsepp", "mining": "all"}, {"bidirectional": True, "text_pooling": "mean", "num_layers": 2}),
        ({"loss": "siglip", "mining": "all", "optimizer": "adamw", "weight_decay": 0.1}, {}),
        ({"precision": "bfloat16"}, {"direction": "mean", "aggregation": "logsumexp"}),
    ],
)
def test_what_every_configuration_saves_is_accepted(
    data: Path, tmp_path: Path, changes: dict[str, object], options: dict[str, object]
) -> None:
    """Every weight has a gradient and thus moments."""
    settings = config(data, tmp_path / "run", **changes, model_options={**OPTIONS, **options})
    train(settings)
    trainer = make_trainer(settings)
    trainer.restore()
    saved = load_state(tmp_path / "run")
    taken = trainer.stepper.state_dict()
    assert taken["scheduler"] == saved["scheduler"]
    assert taken["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    learned = [*trainer.model.parameters(), *trainer.stepper.losses.parameters()]
    assert len(taken["optimizer"]["state"]) == len(learned)
    for index, kept in saved["optimizer"]["state"].items():
        for name, values in kept.items():
            assert torch.equal(taken["optimizer"]["state"][index][name], values)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.pt: no such file; there is no run to resume"):
        load_state(tmp_path)
    save_state(tmp_path, {"position": 3})
    assert load_state(tmp_path)["position"] == 3
    path = tmp_path / "last" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint.pt: not a readable training state"):
        load_state(tmp_path)
    torch.save({"format_version": 9}, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt: format_version 9 is newer than 1, the newest that this"):
        load_state(tmp_path)


def test_a_state_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    torch.save({"format_version": 1, "hidden": print}, tmp_path / "last" / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt: not a readable training state"):
        load_state(tmp_path)


def test_a_changed_bit_of_a_tensor_is_noticed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checksum detects a changed bit even if every value is still a number."""
    path = run / "last" / "checkpoint.pt"
    weight = torch.load(path, weights_only=True)["model"]["image_encoder.fc.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    assert content.count(weight) == 1
    content[content.index(weight)] ^= 1
    path.write_bytes(content)
    assert math.isfinite(float(torch.load(path, weights_only=True)["model"]["image_encoder.fc.weight"].sum()))
    assert resume_error(capsys, run) == (
        f"{path}: not a readable training state: damaged: its content does not match its checksum"
    )
