"""Published files, packed and used for training in several processes; and the figures of the committed demo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from itm_fast import cli
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.processes import run as run_process

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_coco_from_its_files_to_a_training_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes train on the CPU, with small sizes and few captions."""
    write_concepts(tmp_path / "data" / "coco_precomp")
    monkeypatch.chdir(tmp_path)
    small = ["--epochs", "1", "--batch-size", "59", "--log-every", "1", "--model-option", "embed_dim=16"]

    def losses(name: str) -> list[float]:
        return [line["loss"] for line in read_metrics(Path(name, "metrics.jsonl")) if line["kind"] == "train"]

    assert cli.run(["data", "pack", "--data", "data/coco_precomp", "--out", "data/coco_store", "--dtype", "bf16"]) == 0
    assert cli.run(["data", "check", "data/coco_store"]) == 0
    options = ["train", "--data", "data/coco_store", "--recipe", "scan-t2i-coco", "--out", "runs/scan-coco", *small]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = run_process([*launcher, "-m", "itm_fast", *options], cwd=tmp_path, OMP_NUM_THREADS=1, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best model: ") == 1
    options[options.index("--out") + 1] = "runs/alone"
    assert cli.run(options) == 0
    # 120 captions make batches of 59, 59 and 2. Initial weights and batches equal those of a single process.
    assert len(losses("runs/scan-coco")) == 3
    assert losses("runs/scan-coco")[0] == pytest.approx(losses("runs/alone")[0], rel=1e-5)


def test_the_committed_demo_learned_what_it_promises_in_the_time_it_promises() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    assert result["trained"]["rsum"] >= 300
    assert result["seconds"] <= 8 * 60
    assert result["environment"]["threads"] == 2
