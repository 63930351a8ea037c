"""The bundled experiments: equal budgets, and a result for every run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from itm_fast import config as settings
from itm_fast.training import TrainConfig
from itm_fast.training.config import DATA, MACHINE, OPTIMIZER, OUTPUT

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "benchmarks" / "experiments").glob("*.yaml"))
# Experiments with a result for every run. The others are not complete, and show missing cells as not run.
COMPLETE = ["addr", "dbl", "dbl-imitation", "fdf", "rcar", "selhn", "selhn-models", "vision"]
# Rows that state a different budget.
OTHER_BUDGETS = {"dbl": {"Baseline, twice the epochs"}}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.experiments import __main__ as experiments

    return experiments


def preset(name: str) -> Path:
    return ROOT / "benchmarks" / "experiments" / f"{name}.yaml"


@pytest.mark.parametrize("name", COMPLETE)
def test_each_run_of_a_complete_experiment_has_a_result(tool: ModuleType, name: str) -> None:
    experiment = tool.read(preset(name))
    wanted = {run.file_name for runs in experiment.rows.values() for run in runs}
    wanted |= {ensemble.file_name for ensemble in experiment.ensembles}
    folder = ROOT / "benchmarks" / "results" / "experiments" / name
    assert {path.stem for path in folder.glob("*.json")} == wanted


@pytest.mark.parametrize("name", PRESETS)
def test_all_rows_have_the_same_budget(tool: ModuleType, name: str) -> None:
    """Rows share data, steps, optimiser, schedule and widths. They differ in the model, the loss and the anchor."""
    experiment = tool.read(preset(name))
    groups = {setting: field.metadata["group"] for setting, field in settings.fields_of(TrainConfig).items()}
    chosen = {name for choice in (experiment.grid.choices.values() if experiment.grid else ()) for name in choice}
    budgets, widths = [], set()
    for row, runs in experiment.rows.items():
        for run in runs:
            train = experiment.identity(run)["train"]
            widths.add(train["model_options"]["embed_dim"])
            if row not in OTHER_BUDGETS.get(name, ()):
                kept = {setting for setting, group in groups.items() if group in (DATA, MACHINE, OPTIMIZER, OUTPUT)}
                budgets.append({k: v for k, v in train.items() if k in kept - {"seed", *chosen}})
    assert len(widths) == 1
    assert {"epochs", "batch_size", "lr", "lr_schedule"} - chosen <= set(budgets[0])
    assert all(budget == budgets[0] for budget in budgets)


def test_the_results_are_small_and_say_what_they_are(tool: ModuleType) -> None:
    for name in PRESETS:
        experiment = tool.read(preset(name))
        runs = [run for runs in experiment.rows.values() for run in runs]
        names = {run.file_name: run.row for one in runs for run in (one, *one.trials)}
        names |= {ensemble.file_name: ensemble.name for ensemble in experiment.ensembles}
        for path in (ROOT / "benchmarks" / "results" / "experiments" / name).glob("*"):
            assert path.suffix == ".json"
            assert path.stat().st_size < 40_000
            assert json.loads(path.read_text())["identity"]["row"] == names[path.stem]
