"""Several processes on one feature store: a full disk, a changed shard, features in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from itm_fast.data import pack
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.runs import differences, what_a_run_leaves
from python_tests.helpers.worlds import Outcome, run_jobs, train_job, turn_a_bit

pytestmark = pytest.mark.thorough

# Three steps per epoch; states are saved after steps 2, 3, 4 and 6.
OPTIONS = ("--batch-size", "59", "--epochs", "2", "--save-every", "2", "--model-option", "word_dropout=0.3")
FULL = {"full state": "last/checkpoint.pt", "full log": "metrics.jsonl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(quiet_data: Path, folder: Path) -> dict[str, list[Outcome]]:
    """Return the outcome of each job by name; they run in this order."""
    for name in ("store", "changed store"):
        pack(quiet_data, folder / name, shard_bytes=300)
    shard = folder / "changed store" / "train-00005.safetensors"

    def train(name: str, *options: object, store: str = "store", **more: Any) -> dict[str, Any]:
        return train_job(2, folder / store, folder / name, *OPTIONS, *options, **more)

    def resumed(name: str) -> dict[str, Any]:
        return {"size": 2, "arguments": ["train", "--out", str(folder / name), "--resume"]}

    jobs = {
        "disk": train("disk", "--features", "disk"),
        "host": train("host", "--features", "host"),
        "full state": train("full state", full=[0, 4, str(folder / "full state" / FULL["full state"]), 0.5]),
        "full state, resumed": resumed("full state"),
        "full log": train("full log", full=[0, 4, str(folder / "full log" / FULL["full log"]), 1.0]),
        "full log, resumed": resumed("full log"),
        # Each process has four of eight captions, so often only one reads rows of a shard.
        "changed": train("changed", "--batch-size", "8", store="changed store", change=[1, 4, str(shard)]),
    }
    return dict(zip(jobs, run_jobs(list(jobs.values())), strict=True))


def test_features_of_the_host_are_those_of_the_disk(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    for name in ("disk", "host"):
        assert [(status, error) for status, _, error in outcomes[name]] == [(0, "")] * 2
    assert "features: disk (as asked for)\n" in outcomes["disk"][0][1]
    line = r"^features: host \(0\.00 GiB of features, \d+\.\d\d GiB to spare in the memory of the host\)$"
    assert re.search(line, outcomes["host"][0][1], re.MULTILINE)
    disk, host = (what_a_run_leaves(folder / name) for name in ("disk", "host"))
    assert host["settings"] == [line.replace(": disk", ": host") for line in disk.pop("settings")]
    del host["settings"]
    assert differences(disk, host) == []


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_ends_all_processes_with_one_line_and_the_last_state_is_whole(
    outcomes: dict[str, list[Outcome]], folder: Path, name: str
) -> None:
    """Only the first process writes; both learn of the error, and one reports it."""
    message = f"{folder / name / FULL[name]}: cannot be written: File too large; its earlier content is kept"
    assert [status for status, _, _ in outcomes[name]] == [1, 1]
    assert sorted(error for _, _, error in outcomes[name]) == ["", f"itm-fast: error: {message}\n"]
    # Nothing is lost: with space on the disk, the same processes end like those that never lacked it.
    assert [(status, error) for status, _, error in outcomes[f"{name}, resumed"]] == [(0, "")] * 2
    left, whole = what_a_run_leaves(folder / name), what_a_run_leaves(folder / "disk")
    assert [line.replace(": auto", ": disk") for line in left.pop("settings")] == whole.pop("settings")
    assert differences(whole, left) == []


def test_a_shard_that_changes_while_they_train_ends_all_processes_with_one_line(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    shard = folder / "changed store" / "train-00005.safetensors"
    assert [status for status, _, _ in outcomes["changed"]] == [1, 1]
    silent, told = sorted(error for _, _, error in outcomes["changed"])
    assert silent == ""
    what = "cannot be read: the shard was changed or replaced since it was opened"
    assert re.fullmatch(rf"itm-fast: error: {re.escape(str(shard))}: row \d+ \(image \d+\) {what}\n", told)
    steps = [line["step"] for line in read_metrics(folder / "changed" / "metrics.jsonl")]
    assert load_state(folder / "changed")["position"] == steps[-1] // 2 * 2 >= 4
    # Only the contents count, and they are the same again.
    turn_a_bit(shard)
    (resumed,) = run_jobs([{"size": 2, "arguments": ["train", "--out", str(folder / "changed"), "--resume"]}])
    assert [(status, error) for status, _, error in resumed] == [(0, "")] * 2
    assert load_state(folder / "changed")["position"] == 30
