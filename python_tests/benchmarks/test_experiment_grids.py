"""Experiments choose settings on the validation split, share runs among processes, and compare rows seed by seed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.experiments import __main__ as tool
from benchmarks.experiments import results, verdicts
from benchmarks.experiments.reading import read
from benchmarks.experiments.results import with_winners
from benchmarks.experiments.verdicts import counted, in_short, interval, verdicts_of_papers
from itm_fast.files import atomic

ROOT = Path(__file__).resolve().parents[2]
CHOICES = {"small rate": {"lr": 1e-6}, "large rate": {"lr": 5e-3}}


def write(path: Path, data: Path, **changes: object) -> Path:
    content: dict[str, object] = {
        "title": "tiny", "data": str(data), "split": "dev", "seeds": [0, 1],
        "train": {"model": "vsepp", "model_options": {"embed_dim": 8, "word_dim": 6}, "epochs": 2, "batch_size": 32},
        "grid": {"seed": 9, "choices": CHOICES},
        "rows": [{"name": "VSE"}, {"name": "all", "train": {"mining": "all"}},
                 {"name": "SCT", "seeds": [0], "grid_row": "VSE", "train": {"mining": "sct"}}],
        "claims": [{"text": "all negatives help", "row": "all", "over": "VSE"},
                   {"text": "SCT helps", "row": "SCT", "over": "VSE", "of": "mean_distance"}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def places(experiment: Path) -> list[str]:
    return [str(experiment), "--results", str(experiment.parent / "results")]


def run(experiment: Path, *more: str) -> list[str]:
    return ["run", *places(experiment), "--out", str(experiment.parent / "runs"), "--threads", "1", *more]


def measured(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results").iterdir()}


def test_anchors_of_figures_have_the_settings_of_the_winner(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "VSE"}, {"name": "OAS", "anchor_row": "VSE", "grid_row": "VSE", "train": {"scenario": "oas"}}]
    figures = [{"file": "f.svg", "shows": "scores", "text": "Scores", "rows": ["OAS"]}]
    experiment = read(write(tmp_path / "e.yaml", data, rows=rows, figures=figures, claims=[]))
    monkeypatch.setattr(results, "result_of", lambda _, run, folder: {"validation": {"rsum": run.train["lr"]}})
    for shown in with_winners(experiment, tmp_path).figures[0].runs:
        assert shown.anchor is not None
        assert (shown.train["lr"], shown.anchor.train["lr"]) == (5e-3, 5e-3)


@pytest.mark.thorough
def test_the_grid_is_trained_first_and_its_winner_used(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write(tmp_path / "e.yaml", data)
    # Two processes share the runs: each run is trained once, the finals after all trials of their row.
    command = [sys.executable, "-m", "benchmarks.experiments", *run(experiment)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tool.main(run(experiment)) == 0
    lines = [*capsys.readouterr().out.splitlines(), *other.communicate(timeout=300)[0].splitlines()]
    assert other.returncode == 0
    trained = sorted(line.partition(": ")[0] for line in lines if " run" in line and " left" in line)
    trials = [f"{row}, {label}, seed 9" for row in ("VSE", "all") for label in CHOICES]
    assert trained == sorted([*trials, "VSE, seed 0", "VSE, seed 1", "all, seed 0", "all, seed 1", "SCT, seed 0"])

    found = measured(tmp_path)
    for row, name in (("VSE", "vse"), ("all", "all"), ("SCT", "vse")):
        tried = {label: found[f"{name}-{label.replace(' ', '-')}-seed9"] for label in CHOICES}
        best = max(CHOICES, key=lambda label: tried[label]["validation"]["rsum"])
        assert found[f"{row.lower()}-seed0"]["identity"]["train"]["lr"] == CHOICES[best]["lr"]
        assert {label: one["identity"]["train"]["lr"] for label, one in tried.items()} == {
            label: choice["lr"] for label, choice in CHOICES.items()
        }

    assert tool.main(["table", *places(experiment)]) == 0
    table = capsys.readouterr().out
    assert "chosen by the sum of recalls on validation, seed 9" in table
    tried = {label: found[f"vse-{label.replace(' ', '-')}-seed9"] for label in CHOICES}
    best = max(CHOICES, key=lambda label: tried[label]["validation"]["rsum"])
    assert f"| VSE | {best} | {'; '.join(sorted(CHOICES))} |\n| SCT | as VSE | no others |\n" in table
    pairs = [found[f"all-seed{s}"]["test"]["rsum"] - found[f"vse-seed{s}"]["test"]["rsum"] for s in (0, 1)]
    low, high = interval(pairs)
    assert f"| 2 | {statistics.mean(pairs):+.1f} | {low:+.1f} to {high:+.1f} | **" in table
    far = found["sct-seed0"]["test"]["mean_distance"] - found["vse-seed0"]["test"]["mean_distance"]
    assert f"| MD | 1 | {far:+.3f} | one seed | open |" in table

    trial = max((one["validation"]["rsum"], name) for name, one in found.items() if name.endswith("-seed9"))[1]
    for name, one in found.items():
        one["environment"]["uncommitted_changes"] = name == trial
        atomic.write_text(tmp_path / "results" / f"{name}.json", json.dumps(one))
    assert tool.main(["table", *places(experiment)]) == 0
    assert f"seed 9, 1 of {len(trials)} runs with uncommitted changes." in capsys.readouterr().out

    # If the trials had another winner, the finished runs would belong to other settings.
    path, changed = tmp_path / "results" / f"{trial}.json", found[trial]
    changed["validation"]["rsum"] = -1
    atomic.write_text(path, json.dumps(changed))
    assert tool.main(["table", *places(experiment)]) == 1
    assert "was measured with lr = " in capsys.readouterr().err


@pytest.mark.thorough
def test_trials_beside_an_anchor_have_one_with_the_seed_of_the_grid(data: Path, tmp_path: Path) -> None:
    rows = [{"name": "VSE", "choices": {}, "train": {"lr": 1e-3}},
            {"name": "OAS", "anchor_row": "VSE", "train": {"scenario": "oas"}}]  # fmt: skip
    experiment = write(tmp_path / "e.yaml", data, seeds=[0], rows=rows, claims=[])
    assert tool.main(run(experiment)) == 0
    found = measured(tmp_path)
    trials = {f"oas-{label.replace(' ', '-')}-seed9" for label in CHOICES}
    assert found.keys() == {"vse-seed9", *trials, "vse-seed0", "oas-seed0"}
    for name in (*trials, "oas-seed0"):
        weights = found[f"vse-{name.rpartition('-')[2]}"]["weights"]
        assert found[name]["identity"]["fingerprints"]["anchor"] == {"the weights of VSE": weights}
        assert found[name]["identity"]["anchor"]["train"]["lr"] == 1e-3
    best = max(trials, key=lambda name: found[name]["validation"]["rsum"])
    assert found["oas-seed0"]["identity"]["train"]["lr"] == found[best]["identity"]["train"]["lr"]


@pytest.mark.thorough
def test_a_run_that_diverges_is_a_result(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It wins no grid and does not stop the others; tables and claims name it."""
    absurd = {"choices": {"a": {"lr": 1e38}, "b": {"lr": 2e38}}}
    rows = [{"name": "VSE"}, {"name": "absurd", **absurd}]
    grid = {"seed": 9, "choices": {"absurd rate": {"lr": 1e38}, "rate": {"lr": 1e-3}}}
    claims = [{"text": "absurd rates help", "row": "absurd", "over": "VSE"}]
    pair = [{"name": "two absurd ones", "row": "absurd", "seeds": [0, 1]}]
    experiment = write(tmp_path / "e.yaml", data, rows=rows, grid=grid, claims=claims, ensembles=pair)
    assert tool.main(run(experiment)) == 0
    found = measured(tmp_path)
    assert found["vse-absurd-rate-seed9"]["test"] is None
    assert "became nan at step " in found["absurd-seed0"]["diverged"]
    assert found["vse-seed0"]["identity"]["train"]["lr"] == 1e-3
    capsys.readouterr()
    assert tool.main(["table", *places(experiment)]) == 0
    table = capsys.readouterr().out
    assert f"| absurd | {' | '.join(['diverged'] * 7)} |" in table
    assert "| absurd rates help | absurd minus VSE | sum of recalls | 0 | diverged |  | open |" in table
    assert "| two absurd ones |  |  | not run |" in table
    measured_ones = [(with_winners(read(experiment), tmp_path / "results"), tmp_path / "results")]
    assert in_short(measured_ones) == "- **Open**: 1 claim.\n"
    row = "| [Paper](page.md) | absurd rates help | sum of recalls | 0 | diverged |  | open | "
    papers = {"Paper": ("page.md", measured_ones)}
    assert row in verdicts_of_papers(papers)
    assert counted(papers).splitlines()[-1] == "| [Paper](page.md) | 0 | 0 | 1 |"


def test_claims_in_short(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [{"text": "all negatives help", "row": "all", "over": "VSE"},
              {"text": "all negatives harm", "row": "VSE", "over": "all", "of": "mean_distance", "late": True},
              {"text": "SCT helps", "row": "SCT", "over": "VSE", "of": "mean_distance"}]  # fmt: skip
    experiment = read(write(tmp_path / "e.yaml", data, claims=claims))
    sums = {("VSE", 0): 300.0, ("VSE", 1): 310.0, ("all", 0): 309.9, ("all", 1): 320.1, ("SCT", 0): 290.0}
    found = {key: {"test": {"rsum": value, "mean_distance": value / 1000}} for key, value in sums.items()}
    # One run was interrupted, and has no time; one had another processor.
    seconds = {("VSE", 0): 10.0, ("VSE", 1): 30.0, ("all", 0): None, ("all", 1): 75.0, ("SCT", 0): 8.0}
    for key, result in found.items():
        other = "avx2" if key == ("SCT", 0) else "amx"
        result |= {"cpu_seconds": seconds[key], "environment": {"processor": "Xeon", "instruction_set": other}}
    monkeypatch.setattr(verdicts, "result_of", lambda _, run, folder: found.get((run.row, run.seed)))
    # Differences 9.9 and 10.1; Student's t for two: 10 -+ 1.2706. SCT has one seed.
    lines = [
        "- **Holds**: all negatives help, +10.0 (+8.7 to +11.3; 2 seeds).",
        "- **Fails**: all negatives harm †, -0.010 MD (-0.011 to -0.009; 2 seeds).",
    ]
    assert in_short([(experiment, tmp_path)]).splitlines() == [*lines, "- **Open**: 1 other claim."]
    twice = [lines[0], lines[0], lines[1], lines[1], "- **Open**: 2 other claims."]
    assert in_short([(experiment, tmp_path)] * 2).splitlines() == twice
    table = verdicts_of_papers({"Paper": ("page.md", [(experiment, tmp_path)])}).splitlines()
    assert [line.rsplit("|", 2)[1] for line in table[2:]] == [" 2.5x ", " 0.4x ", "  "]
    found.clear()
    assert in_short([(experiment, tmp_path)]) == "- **Not run**: 3 claims.\n"


def test_a_claim_stays_open_if_some_runs_diverged(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [{"text": "all negatives help", "row": "all", "over": "VSE"}]
    experiment = read(write(tmp_path / "e.yaml", data, seeds=[0, 1, 2], claims=claims))
    sums = {("VSE", 0): 300.0, ("VSE", 1): 310.0, ("VSE", 2): 305.0, ("all", 0): 309.9, ("all", 1): 320.1}
    found = {key: {"test": {"rsum": value}, "cpu_seconds": None} for key, value in sums.items()}
    monkeypatch.setattr(verdicts, "result_of", lambda _, run, folder: found.get((run.row, run.seed)))
    assert in_short([(experiment, tmp_path)]).startswith("- **Holds**: all negatives help, +10.0")
    found["all", 2] = {"test": None, "diverged": "the loss became nan at step 7", "cpu_seconds": None}
    assert in_short([(experiment, tmp_path)]) == "- **Open**: 1 claim.\n"
    (*_, line, last) = verdicts_of_papers({"Paper": ("page.md", [(experiment, tmp_path)])}).split("\n")
    expected = "| [Paper](page.md) | all negatives help | sum of recalls | 2 | +10.0 | 1 seed diverged | open |  |"
    assert (line, last) == (expected, "")


def test_a_claim_stays_open_if_a_run_of_an_ensemble_diverged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "VSE"}, {"name": "all", "seeds": [0, 1, 2, 3, 4, 5], "train": {"mining": "all"}}]
    pairs = [{"name": "two of all", "row": "all", "groups": [[0, 3], [1, 4], [2, 5]]}]
    claims = [{"text": "two help", "row": "two of all", "over": "VSE"}]
    path = write(tmp_path / "e.yaml", data, seeds=[0, 1, 2], rows=rows, ensembles=pairs, claims=claims)
    single = {0: 300.0, 1: 310.0, 2: 305.0}
    runs = {("VSE", seed): {"test": {"rsum": rsum}, "cpu_seconds": None} for seed, rsum in single.items()}
    means = {0: {"test": {"rsum": 309.9}}, 1: {"test": {"rsum": 320.1}}, 2: {"test": {"rsum": 315.2}}}
    monkeypatch.setattr(verdicts, "result_of", lambda _, run, folder: runs.get((run.row, run.seed)))
    monkeypatch.setattr(verdicts, "ensemble_result", lambda _, one, folder: means.get(one.seed))
    assert in_short([(read(path), tmp_path)]).startswith("- **Holds**: two help, +10.1")
    # An ensemble with such a run is not evaluated.
    del means[2]
    runs["all", 5] = {"test": None, "diverged": "the loss became nan at step 7"}
    assert in_short([(read(path), tmp_path)]) == "- **Open**: 1 claim.\n"


def test_intervals_of_paired_differences() -> None:
    # Student's t by hand: mean 2, standard deviation 1, three differences.
    assert interval(list(map(float, range(11)))) == pytest.approx((5 - 2.228, 5 + 2.228))
    with pytest.raises(ValueError, match=r"^claims: expected 2 to 20 seeds, got 21$"):
        interval([0.0] * 21)
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"seed": 9, "choices": {"one": {}}}}, "choices: expected at least two labels with settings"),
        ({"grid": {"seed": 9, "choices": {"a": {"lrr": 1}, "b": {}}}}, "lrr"),
        ({"rows": [{"name": "VSE", "choices": {"a": {}, "b": {}, "c": {}}}]}, "expected 2 as in the grid, got 3"),
        ({"rows": [{"name": "SCT", "grid_row": "VSE"}]}, "grid_row: expected the name of a row above it, got 'VSE'"),
        (
            {"rows": [{"name": "VSE"}, {"name": "OAS", "anchor_row": "VSE", "train": {"scenario": "oas"}}]},
            "OAS: expected grid_row, or as anchor_row one with 'choices: {}' and no anchor or start",
        ),
        ({"claims": [{"text": "t", "row": "VES", "over": "VSE"}]}, "row of a claim"),
        ({"claims": [{"text": "t", "row": "all", "over": "VSE", "of": "loss"}]}, "measure of a claim"),
    ],
)
def test_wrong_grids_and_claims_are_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, message: str
) -> None:
    experiment = write(tmp_path / "e.yaml", data, **changes)
    if "rows" in changes:
        experiment = write(tmp_path / "e.yaml", data, **changes, claims=[])
    assert tool.main(run(experiment)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
