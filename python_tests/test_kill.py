"""A training that is killed and resumed again and again ends bit for bit like one that was left alone."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from helpers.concepts import write_concepts
from helpers.kills import PLACES
from helpers.processes import ROOT
from helpers.processes import run as run_process

from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics

KILLS = 20


def what_a_run_leaves(run: Path) -> dict[str, object]:
    """Everything in a RUN folder that does not depend on the time of day or on where the folder lies."""
    state = load_state(run)
    assert state.pop("seconds") > 0
    # Lines differ in length with the digits of their seconds.
    assert 0 < state.pop("log_size") <= (run / "metrics.jsonl").stat().st_size
    log = read_metrics(run / "metrics.jsonl")
    for line in log:
        assert line.pop("seconds") >= 0
    settings = [line for line in (run / "train.yaml").read_text().splitlines() if not line.startswith("out:")]
    return {
        "state": state,
        "log": log,
        "settings": settings,
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        **{path.name: path.read_bytes() for path in run.iterdir() if path.suffix in (".safetensors", ".json")},
    }


def differences(left: object, right: object, name: str = "run") -> list[str]:
    """The names of all parts that are not equal bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [name]
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{name}.{key}" for key in left.keys() ^ right.keys()]
        both = [key for key in left if key in right]
        return missing + [part for key in both for part in differences(left[key], right[key], f"{name}.{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [part for index, pair in pairs for part in differences(*pair, f"{name}[{index}]")]
    return [] if type(left) is type(right) and left == right else [name]


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL twenty times: at calls anywhere, during saves, during validations, and after times that pass outside."""
    seed = random.SystemRandom().randrange(2**32)
    arguments = ["-m", "helpers.kills", write_concepts(tmp_path / "data"), tmp_path, KILLS, seed]
    done = run_process([sys.executable, *arguments], cwd=ROOT, PYTHONPATH=ROOT / "python_tests", OMP_NUM_THREADS=1)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    where = json.loads(done.stdout)
    total = {place: sum(kills.get(place, 0) for kills in where) for place in PLACES}
    assert total == dict.fromkeys(PLACES, KILLS // len(PLACES))
    whole = what_a_run_leaves(tmp_path / "whole")
    steps = [line["step"] for line in whole["log"] if line["kind"] == "train"]
    validations = [line["step"] for line in whole["log"] if line["kind"] == "validation"]
    assert (steps, validations) == ([3, 6, 9, 12], [5, 10, 12])
    assert whole["state"]["position"] == 12
    for number, kills in enumerate(where):
        found = differences(whole, what_a_run_leaves(tmp_path / str(number)))
        assert not found, f"seed {seed}, run {number}, killed {kills}: {found}"
