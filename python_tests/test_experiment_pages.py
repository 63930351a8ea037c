"""The experiments that come with the sources: equal budgets, pages that hold their results, figures that are drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from itm_fast import config as settings
from itm_fast.training import TrainConfig
from itm_fast.training.config import DATA, MACHINE, OPTIMIZER, OUTPUT

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "benchmarks" / "experiments").glob("*.yaml"))
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
# Experiments whose every run has a result; those of the others, one for a GPU, say of a cell that it was not run.
COMPLETE = ["addr", "dbl", "dbl-imitation", "fdf", "rcar", "selhn", "selhn-models"]
# Figures of the pages that other commands draw.
OTHER_FIGURES = {"fdf-realignment.svg"}
# Rows that say that their budget is another one.
OTHER_BUDGETS = {"dbl": {"Baseline, twice the epochs"}}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import experiments

    return experiments


def preset(name: str) -> Path:
    return ROOT / "benchmarks" / "experiments" / f"{name}.yaml"


def test_every_experiment_has_its_place_in_one_page() -> None:
    found = [name for page in PAGES for name in re.findall("<!-- experiment (.*) -->", page.read_text())]
    assert sorted(found) == PRESETS
    assert {"dbl", "rcar", "rcar-full", "selhn", "selhn-models"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_pages_hold_the_results_that_are_there(tool: ModuleType, tmp_path: Path, name: str) -> None:
    (page,) = (page for page in PAGES if f"<!-- experiment {name} -->" in page.read_text())
    assert tool.main(["table", str(preset(name)), "--page", str(page), "--check"]) == 0
    stale = tmp_path / "page.md"
    stale.write_text(page.read_text().replace("| ---: |", "| ---: | 1.0 |"))
    assert tool.main(["table", str(preset(name)), "--page", str(stale), "--check"]) == 1
    assert tool.main(["table", str(preset(name)), "--page", str(stale)]) == 0
    marked = [
        text.read_text().partition(f"<!-- experiment {name} -->")[2].partition("<!-- end")[0] for text in (page, stale)
    ]
    assert marked[0] == marked[1]


@pytest.mark.parametrize("name", COMPLETE)
def test_each_run_of_a_complete_experiment_has_a_result(tool: ModuleType, name: str) -> None:
    experiment = tool.read(preset(name))
    wanted = {run.file_name for runs in experiment.rows.values() for run in runs}
    wanted |= {ensemble.file_name for ensemble in experiment.ensembles}
    folder = ROOT / "benchmarks" / "results" / "experiments" / name
    assert {path.stem for path in folder.glob("*.json")} == wanted
    (page,) = (page for page in PAGES if f"<!-- experiment {name} -->" in page.read_text())
    assert "not run" not in page.read_text().partition(f"<!-- experiment {name} -->")[2].partition("<!-- end")[0]


@pytest.mark.parametrize("name", PRESETS)
def test_all_rows_have_the_same_budget(tool: ModuleType, name: str) -> None:
    """Data, steps, optimiser, schedule and widths; rows differ in the model, the loss and what they train beside."""
    experiment = tool.read(preset(name))
    groups = {setting: field.metadata["group"] for setting, field in settings.fields_of(TrainConfig).items()}
    budgets, widths = [], set()
    for row, runs in experiment.rows.items():
        for run in runs:
            train = experiment.identity(run)["train"]
            widths.add(train["model_options"]["embed_dim"])
            if row not in OTHER_BUDGETS.get(name, ()):
                kept = {setting for setting, group in groups.items() if group in (DATA, MACHINE, OPTIMIZER, OUTPUT)}
                budgets.append({k: v for k, v in train.items() if k in kept and k != "seed"})
    assert len(widths) == 1
    assert {"epochs", "batch_size", "lr", "lr_schedule"} <= set(budgets[0])
    assert all(budget == budgets[0] for budget in budgets)


def rows_of(tool: ModuleType, name: str) -> dict[str, list[int]]:
    return {row: [run.seed for run in runs] for row, runs in tool.read(preset(name)).rows.items()}


def test_the_rows_are_those_of_the_papers_tables(tool: ModuleType) -> None:
    """Three seeds for what the papers start from and what they find best, one for the rest."""
    losses = {"all negatives": 1, "hardest (HN)": 3, "semi-hard (SHN)": 1, "contrastive (SCT)": 1, "SelHN": 3}
    models = ("VSE (FC)", "VSE (MLP)", "RVSE (MLP)")
    assert rows_of(tool, "selhn") == {
        f"{model}: {loss}": list(range(seeds)) for model in models for loss, seeds in losses.items()
    }
    assert rows_of(tool, "selhn-models") == {
        f"{model}: {loss}": list(range(seeds))
        for model, seeds in (("SCAN", 3), ("BFAN", 1), ("SGRAF", 1))
        for loss in ("hardest (HN)", "SelHN")
    }
    several = {"Baseline": [0, 1, 2], "AM (MSS)": [0, 1, 2]}
    single = ("Baseline, twice the epochs", "RS (OSS)", "AS (OSS)", "RM, soft (OSS)", "AM, soft (OSS)", "RM (OSS)",
              "AM (OSS)", "RS and AS (OSS)", "RM and AM (OSS)", "RM (OAS)", "AM (OAS)", "no boosting (OAS)",
              "RM (MSS)")  # fmt: skip
    assert rows_of(tool, "dbl") == {**several, **{row: [0] for row in single}}
    compared = ("Baseline", "DR (OAS)", "RKD (OAS)", "AM (OAS)", "no boosting (OAS)", "DML (OSS)", "DINO (MSS)",
                "DINO*, inverse (MSS)", "AM (MSS)")  # fmt: skip
    assert rows_of(tool, "dbl-imitation") == {row: [0] for row in compared}
    experiment = tool.read(preset("dbl"))
    for row, runs in experiment.rows.items():
        anchors = {run.anchor.file_name for run in runs if run.anchor is not None}
        assert anchors == ({"baseline-seed0"} if row.endswith("(OAS)") else set())


def test_pictures_of_results_are_those_of_experiments(tool: ModuleType) -> None:
    """Each page shows what its experiments draw, and nothing else but what its own commands do."""
    drawn = OTHER_FIGURES | {figure.file for name in PRESETS for figure in tool.read(preset(name)).figures}
    for page in PAGES:
        shown = re.findall(r"!\[[^\]]+\]\(\.\./images/([^)]+)\)", page.read_text())
        assert len(shown) == len(set(shown))
        assert set(shown) <= drawn
        assert all((ROOT / "docs" / "images" / name).is_file() for name in shown)


def test_the_results_are_small_and_say_what_they_are(tool: ModuleType) -> None:
    for name in PRESETS:
        experiment = tool.read(preset(name))
        names = {run.file_name: run.row for runs in experiment.rows.values() for run in runs}
        names |= {ensemble.file_name: ensemble.name for ensemble in experiment.ensembles}
        for path in (ROOT / "benchmarks" / "results" / "experiments" / name).glob("*"):
            assert path.suffix == ".json"
            assert path.stat().st_size < 40_000
            assert json.loads(path.read_text())["identity"]["row"] == names[path.stem]
