"""The README's example runs as it stands there, and its table of operators is the public module."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import cli
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.processes import run as run_process

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    printed: list[float] = []
    torch.manual_seed(0)
    names: dict = {"print": printed.append}
    exec(code, names)
    (rsum,) = printed
    assert 0 <= rsum <= 600
    assert names["scores"].shape == (3, 3)
    assert float(names["words"].grad.abs().sum()) > 0
    # Words past a caption's length take no part.
    assert float(names["words"].grad[0, 12:].abs().max()) == 0
    assert len([line for line in code.splitlines() if line]) <= 15


def test_coco_from_its_files_to_a_training_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three commands as they stand there, on the CPU, with two processes, small sizes and few captions."""
    (block,) = re.findall(r"```\n(itm-fast data pack .*?)```", README, flags=re.DOTALL)
    lines = block.splitlines()
    assert len(lines) == 3
    write_concepts(tmp_path / "data" / "coco_precomp")
    monkeypatch.chdir(tmp_path)
    small = ["--epochs", "1", "--batch-size", "59", "--log-every", "1", "--model-option", "embed_dim=16"]

    def losses(name: str) -> list[float]:
        return [line["loss"] for line in read_metrics(Path(name, "metrics.jsonl")) if line["kind"] == "train"]

    pack, check, train = (line.split() for line in lines)
    for command in (pack, check):
        assert command[0] == "itm-fast"
        assert cli.run(command[1:]) == 0
    assert train[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "itm_fast", "train"]
    options = [*train[5:], *small]
    options[options.index("cuda")] = "cpu"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = run_process([*launcher, *train[3:5], *options], cwd=tmp_path, OMP_NUM_THREADS=1, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best model: ") == 1
    options[options.index("--out") + 1] = "runs/alone"
    assert cli.run(options) == 0
    # 120 captions, two of them in a batch of their own; weights and batches are those of one process.
    assert len(losses("runs/scan-coco")) == 3
    assert losses("runs/scan-coco")[0] == pytest.approx(losses("runs/alone")[0], rel=1e-5)


def test_every_operator_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)
    assert sorted(rows) == sorted(F_itm.__all__)


def test_the_committed_demo_learned_what_it_promises_in_the_time_it_promises() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    assert result["trained"]["rsum"] >= 300
    assert result["seconds"] <= 8 * 60
    assert result["environment"]["threads"] == 2


def test_links_and_pictures_of_all_pages_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert len(pages) >= 9
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
