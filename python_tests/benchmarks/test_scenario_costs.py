"""The benchmark of the training scenarios: what it measures, and its table."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks import scenarios
from benchmarks.scenarios import (
    SCENARIOS,
    Setup,
    added_forwards,
    make_start,
    make_step,
    markdown,
    per_branch,
    run,
)
from itm_fast import models

FIGURES = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "scenarios.json"
TINY = Setup("scan", batch=6, dim=8, features=10, words=30)


def rows() -> dict[str, dict]:
    """Return the results of three rounds; the machine is twice as slow in the second round."""
    speed = (1.0, 2.0, 1.0)
    seconds = {"forward": 0.2, "single": 0.5, "oas": 0.7, "mss": 0.72, "oss, 2 branches": 1.02, "oss, 3 branches": 1.5}
    made = {
        name: {"runs_s": [value * factor for factor in speed], "median_s": value} for name, value in seconds.items()
    }
    peaks = {"single": 100e6, "oas": 112e6, "mss": 118e6, "oss, 2 branches": 195e6, "oss, 3 branches": 290e6}
    for name, peak in peaks.items():
        made[name]["peak_bytes"] = peak
    for name, pairs in {"single": 350, "oas": 490, "mss": 490, "oss, 2 branches": 840, "oss, 3 branches": 1400}.items():
        made[name]["pairs"] = pairs
    return made


def test_what_a_scenario_adds_is_compared_round_by_round() -> None:
    assert added_forwards(rows(), "oas") == pytest.approx(1.0)
    assert added_forwards(rows(), "mss") == pytest.approx(1.1)
    assert per_branch(rows(), "oss, 2 branches") == pytest.approx(1.02)
    assert per_branch(rows(), "oss, 3 branches") == pytest.approx(1.0)


def test_the_table() -> None:
    environment = {
        "processor": "P",
        "threads": 1,
        "date": "2026-01-02T03:04",
        "commit": "0123456789abcdef",
        "command": "c",
    }
    results = {
        "environment": environment,
        "published": {name: {"time": seconds, "memory": room} for name, (seconds, room) in scenarios.PUBLISHED.items()},
        "models": {"scan": {"setup": {"batch": 128, "dim": 1024}, "model_bytes": 12_000_000, "rows": rows()}},
    }
    assert markdown(results).splitlines() == [
        "scan, batches of 128, width 1024; one step of the model alone takes 500 ms, "
        "a forward without gradient 200 ms.",
        "",
        "| scenario | time | the paper's loop: time | memory | the paper's loop: memory | pairs with a gradient "
        "| what it adds | allowed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        "| oas | +40 % | +120 % | +12 % | +12 % | 490 (1.4 x) | 1.00 forwards, 12 MB | 1.1 forwards, 22 MB |",
        "| mss | +44 % | +18 % | +18 % | +11 % | 490 (1.4 x) | 1.10 forwards, 18 MB | 1.1 forwards, 22 MB |",
        "| oss, 2 branches | +104 % | +73 % | +95 % | +100 % | 840 (2.4 x) | 1.02 x 2 steps | 1.05 x 2 steps |",
        "| oss, 3 branches | +200 % |  | +190 % |  | 1,400 (4.0 x) | 1.00 x 3 steps | 1.05 x 3 steps |",
        "",
        "Processor time, median of 3 interleaved runs; memory is the peak of fresh processes with their models, "
        "optimisers and three steps, the median of 3. Pairs are those of the first step over all branches, in brackets "
        "as a multiple of one branch. P, 1 thread(s), 2026-01-02, commit 0123456789ab; made by `c`.",
    ]
    without = copy.deepcopy(results)
    for row in without["models"]["scan"]["rows"].values():
        row["peak_bytes"] = None
    assert (
        "| mss | +44 % | +18 % |  | +11 % | 490 (1.4 x) | 1.10 forwards | 1.1 forwards |"
        in markdown(without).splitlines()
    )


def test_what_is_missed_is_said() -> None:
    measured = {"rows": rows(), "model_bytes": 12_000_000}
    measured["rows"]["mss"]["runs_s"] = [0.742, 1.484, 0.742]
    measured["rows"]["mss"]["peak_bytes"] = 133e6
    assert scenarios._added(measured, "mss") == (
        "1.21 forwards, 33 MB", "1.1 forwards, missed by 10.0 %, 22 MB, missed by 50.0 %",
    )  # fmt: skip
    measured["rows"]["oss, 3 branches"]["runs_s"] = [1.6065, 3.213, 1.6065]
    assert scenarios._added(measured, "oss, 3 branches") == ("1.07 x 3 steps", "1.05 x 3 steps, missed by 2.0 %")
    assert scenarios._added(measured, "oas") == ("1.00 forwards, 12 MB", "1.1 forwards, 22 MB")


def test_pairs_are_counted() -> None:
    """A branch has at most three pairs per anchor: its positive and its hardest negatives. Boosting adds pairs."""
    single, several = (scenarios.pairs_of_a_step(name, TINY) for name in ("single", "oss, 3 branches"))
    assert 6 <= single <= 18
    assert 3 * single * 0.8 < several <= 3 * 18 + 2 * 12


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_measured_is_training(scenario: str) -> None:
    """Measured steps lower the loss of the batch and contain every part of a training step."""
    step = make_step(scenario, TINY)
    losses = [step() for _ in range(15)]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert ("boosting_loss" in losses[0]) == (scenario != "single")
    make_start(scenario, TINY)()


def test_all_of_it_in_one_run() -> None:
    """Every scenario is run as often as asked for."""
    names: list[str] = []
    results = run([TINY], 1, 2, memory=False, progress=names.append)
    assert names == [*SCENARIOS, "forward"] * 3, "the first round warms up"
    measured = results["models"]["scan"]
    assert set(measured["rows"]) == {*SCENARIOS, "forward"}
    assert all(len(row["runs_s"]) == 2 and min(row["runs_s"]) > 0 for row in measured["rows"].values())
    image, words = 10 * 8 + 8, 30 * 300
    gru = 2 * (3 * 8 * 300 + 3 * 8 * 8 + 2 * 3 * 8)
    assert measured["model_bytes"] == 4 * (image + words + gru)
    assert markdown(results).startswith("scan, batches of 6, width 8; one step of the model alone takes ")
    assert json.loads(json.dumps(results)) == results


@pytest.mark.parametrize("model", ["dbl", "scan"])
def test_the_committed_figures_stay_near_what_a_scenario_may_add(model: str) -> None:
    """OAS and MSS add at most 1.1 forwards without gradient and a copy of the model plus 10 MB. OSS takes at most 5 %
    more than M single steps.
    """
    measured = json.loads(FIGURES.read_text())["models"][model]
    assert measured["setup"] == {"model": model, "batch": 128, "dim": 1024, "features": 2048, "words": 10_000}
    rows = measured["rows"]
    copies = models.create(model, vocab_size=10_000).state_dict().values()
    held = sum(value.numel() * value.element_size() for value in copies)
    assert measured["model_bytes"] == held
    for scenario in ("oas", "mss"):
        assert 0.5 < added_forwards(rows, scenario) <= 1.1
        assert 0.5 * held < rows[scenario]["peak_bytes"] - rows["single"]["peak_bytes"] <= held + 10e6
        assert len(rows[scenario]["peak_runs_bytes"]) == 3
    for branches in (2, 3):
        assert 0.9 < per_branch(rows, f"oss, {branches} branches") <= 1.05
