"""The scripts in examples/ run, learn and report their results; the notebook cells run in order."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from itm_fast import training
from itm_fast.data import emoji
from itm_fast.losses import registry
from itm_fast.models import base
from itm_fast.training import TrainResult
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process

EXAMPLES = ROOT / "examples"


def run(script: str, *arguments: object, cwd: Path) -> str:
    """Run a script in its own process from `cwd`, and return what it prints."""
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = run_process(command, cwd=cwd, OMP_NUM_THREADS=1, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a part of the emoji data in the published layout: 40 training, 20 validation and 20 test pictures."""
    folder = tmp_path_factory.mktemp("emoji")
    for split, n in (("train", 40), ("dev", 20), ("test", 20)):
        source = "test" if split == "train" else split
        first = 100 if split == "train" else 0
        np.save(folder / f"{split}_ims.npy", emoji.patches(emoji.pictures(source)[first : first + n]))
        captions = emoji.captions(source)[5 * first : 5 * (first + n)]
        (folder / f"{split}_caps.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return folder


def recalls(printed: str) -> list[float]:
    """Return the numbers in the row of the test split."""
    (row,) = (line for line in printed.splitlines() if line.split()[:1] == ["test"])
    return [float(number) for number in re.findall(r"\d+\.\d+", row)]


def test_score_batch(tmp_path: Path) -> None:
    printed = run("score_batch.py", "--batch", 6, "--dim", 16, cwd=tmp_path)
    assert printed.startswith("scores (6, 6), loss ")
    assert float(re.findall(r"gradient norm of the words (\S+)", printed)[0]) > 0
    assert 0 < float(re.findall(r"rsum (\S+)", printed)[0]) <= 600


def test_train_scan_and_search(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = run("train_scan.py", "--data", data, "--out", out, "--epochs", 2, "--batch-size", 40, cwd=tmp_path)
    found = run("search_and_explain.py", "--checkpoint", out, "--data", data, "--caption", 7, cwd=tmp_path)
    assert recalls(trained) == recalls(found) != []
    caption = emoji.captions("test")[7]
    assert f"{caption!r} finds\n" in found
    assert len(re.findall(r"^  image +\d+  score ", found, flags=re.MULTILINE)) == 5
    words = re.findall(r"^  (\S+)(?: \(unknown\))? +region +\d+  weight (\S+)$", found, flags=re.MULTILINE)
    assert (words[0][0], words[-1][0]) == ("<start>", "<end>")
    assert all(1 / 36 <= float(weight) + 0.005 <= 1.01 for _, weight in words)


@pytest.mark.parametrize(("script", "setting"), [("own_loss.py", "loss: top_k"), ("own_model.py", "model: late_int")])
def test_own_parts_train_like_built_in_ones(script: str, setting: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed = run(script, "--data", data, "--out", out, "--epochs", 3, "--batch-size", 40, cwd=tmp_path)
    assert recalls(printed)
    saved = (out / "train.yaml").read_text()
    assert f"\n{setting}" in saved
    assert "\nwarmup_epochs: 1\n" in saved  # Without it, all scores become equal.
    lines = read_metrics(out / "metrics.jsonl")
    assert all(0 < line["loss"] < 1e4 and line["grad_norm"] > 0 for line in lines if line["kind"] == "train")
    assert len([line for line in lines if line["kind"] == "validation"]) == 3


@pytest.mark.parametrize("script", ["own_loss.py", "own_model.py", "train_scan.py"])
def test_an_example_that_is_interrupted_reports_no_result(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    monkeypatch.setattr(base, "_MODELS", dict(base._MODELS))
    monkeypatch.setattr(training, "train", lambda _config: TrainResult({}, 0, 1, 1.0, finished=False))
    monkeypatch.setattr(sys, "argv", [script, "--data", "data", "--out", "run"])
    runpy.run_path(str(EXAMPLES / script))["main"]()
    assert capsys.readouterr().out == ""


@pytest.mark.thorough
def test_the_own_loop_learns_in_one_process_and_in_two(tmp_path: Path) -> None:
    compiled = ["--compile", "aot_eager", "--bfloat16"]
    alone = run("own_loop.py", "--steps", 102, *compiled, cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, EXAMPLES / "own_loop.py", "--steps", 102]
    both = run_process(command, cwd=tmp_path, OMP_NUM_THREADS=1, PYTHONPATH=ROOT)
    assert both.returncode == 0, both.stderr
    for printed in (alone, both.stdout):
        found = [float(share) for share in re.findall(r"(\d+) % of the captions", printed)]
        assert len(found) == 4
        assert found[0] < 30
        # Halfway, one batch may do much worse than the next.
        assert max(found[2:]) > 60


def test_every_script_is_tested() -> None:
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": "__main__"}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec", dont_inherit=True), names)
    recall = names["recall"]
    assert isinstance(recall, dict)
    untrained = names["untrained"]
    assert isinstance(untrained, dict)
    assert recall["rsum"] > 2 * untrained["rsum"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
