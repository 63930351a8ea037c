"""The benchmark of micro-batches: what it measures, and its table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.micro_batches import SETUPS, markdown, run
from benchmarks.scenarios import Setup

FIGURES = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "micro_batches.json"


def test_all_of_it_in_one_run() -> None:
    """Steps of the plain batch and of micro-batches alternate, as many as asked for."""
    names: list[str] = []
    tiny = Setup("scan", batch=6, dim=8, features=10, words=30)
    results = run([(tiny, (4, 1), 2)], 1, memory=False, progress=names.append)
    assert names == ["plain", "4", "1"] * 3, "the first round warms up"
    (measured,) = results["setups"]
    assert measured["setup"] == {"model": "scan", "batch": 6, "dim": 8, "features": 10, "words": 30}
    assert all(len(row["runs_s"]) == 2 and min(row["runs_s"]) > 0 for row in measured["rows"].values())
    assert json.loads(json.dumps(results)) == results


def test_the_table() -> None:
    environment = {"processor": "P", "threads": 1, "date": "2026-01-02T03:04", "commit": "0123456789abcdef"}
    rows = {
        "plain": {"median_s": 2.0, "runs_s": [2.0], "peak_bytes": 2_000_000_000},
        "128": {"median_s": 2.5, "runs_s": [2.5], "peak_bytes": 500_000_000},
    }
    results = {
        "environment": {**environment, "command": "c"},
        "setups": [{"setup": {"model": "scan", "batch": 1024, "dim": 256}, "rows": rows}],
    }
    assert markdown(results).splitlines()[2:] == [
        "| scan, 1024, 256 | plain | 2,000 MB | 1.00 | 2.0 s | 1.00 |",
        "| scan, 1024, 256 | 128 | 500 MB | 0.25 | 2.5 s | 1.25 |",
        "",
        "Processor time, median of interleaved runs (1 of batches of 1024, width 256); memory is the peak of a fresh "
        "process with its model, optimiser and two steps, without the features of the batch. P, 1 thread(s), "
        "2026-01-02, commit 0123456789ab.",
    ]


def test_the_committed_figures() -> None:
    """Every micro-batch size takes less than half the memory and less than 1.5 times the time. A second forward of the
    encoders is a third more work.
    """
    setups = json.loads(FIGURES.read_text())["setups"]
    assert [measured["setup"] for measured in setups] == [setup.as_dict() for setup, _, _ in SETUPS]
    for measured, (_, sizes, _) in zip(setups, SETUPS, strict=True):
        plain = measured["rows"]["plain"]
        assert list(measured["rows"]) == ["plain", *map(str, sizes)]
        for size in sizes:
            row = measured["rows"][str(size)]
            assert row["peak_bytes"] < plain["peak_bytes"] / 2
            assert row["median_s"] < 1.5 * plain["median_s"]
