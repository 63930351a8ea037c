"""The bundled experiments: equal budgets, and a result for every run."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks.experiments.files import Experiment
from benchmarks.experiments.reading import read
from benchmarks.experiments.results import result_of
from itm_fast import config as settings
from itm_fast import models
from itm_fast.training import TrainConfig
from itm_fast.training.config import DATA, MACHINE, OPTIMIZER, OUTPUT

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "benchmarks" / "experiments").glob("*.yaml"))
# Lists that have not been run: they have no page, and results of trials at most.
PLANNED = sorted(f"planned/{path.stem}" for path in (ROOT / "benchmarks" / "experiments" / "planned").glob("*.yaml"))
# Experiments with a result for every run. The others are not complete, and show missing cells as not run.
COMPLETE = [
    "addr-claims", "addr-regions", "dbl-anchors", "dbl-average", "dbl-claims", "dbl-continued", "dbl-half",
    "dbl-scan", "dbl-variants", "demo-rar", "demo-rates", "fdf-chan", "fdf-chan-seeds", "fdf-claims",
    "fdf-ensemble", "fdf-ensembles", "fdf-ensembles-vse",
    "fdf-heads", "fdf-rates", "fdf-start", "fdf-trained", "fdf-variants", "fdf-vse", "rcar-ablations",
    "rcar-claims", "rcar-epochs", "rcar-grid", "rcar-rates", "rcar-scenes", "rcar-scenes-ten", "rcar-seeds",
    "scan-ramp",
    "selhn-attention", "selhn-bfan", "selhn-bfan-rate", "selhn-claims", "selhn-rates", "selhn-sgraf",
    "selhn-variants", "vision",
]  # fmt: skip
# Rows have the rates that other experiments chose for them; SCAN beside RCAR also has twice that rate. Anchors of
# several qualities have fewer epochs. FDF on SCAN has a row with a lower rate, FDF on CHAN one with more epochs.
# Models to start from are trained beforehand. The demo is compared at several rates, SCAN also with a ramp of the rate.
ALSO_DIFFER = {
    "rcar-ablations": {"lr"}, "dbl-variants": {"lr", "epochs"}, "fdf-variants": {"lr"}, "fdf-start": {"lr", "epochs"},
    "fdf-heads": {"lr", "epochs"}, "fdf-ensemble": {"lr"}, "rcar-epochs": {"lr"}, "demo-rates": {"lr"},
    "fdf-chan": {"epochs"}, "fdf-chan-seeds": {"epochs"}, "fdf-trained": {"epochs"}, "fdf-vse": {"epochs"},
    "fdf-rates": {"epochs"}, "scan-ramp": {"lr_warmup_steps"}, "rcar-scenes": {"lr"}, "rcar-seeds": {"lr"},
    "rcar-scenes-ten": {"lr"}, "fdf-ensembles": {"lr", "epochs"}, "fdf-ensembles-vse": {"lr", "epochs"},
}  # fmt: skip


def preset(name: str) -> Path:
    return ROOT / "benchmarks" / "experiments" / f"{name}.yaml"


@functools.cache
def experiment_of(name: str) -> Experiment:
    """Read an experiment once: the settings of each run are checked."""
    return read(preset(name))


@pytest.mark.parametrize("name", COMPLETE)
def test_each_run_of_a_complete_experiment_has_a_result(name: str) -> None:
    experiment = experiment_of(name)
    runs = [run for of_row in experiment.rows.values() for run in of_row]
    wanted = {one.file_name for run in runs for one in (run, *run.tried())}
    wanted |= {ensemble.file_name for ensemble in experiment.ensembles}
    folder = ROOT / "benchmarks" / "results" / "experiments" / name
    assert {path.stem for path in folder.glob("*.json")} == wanted


@pytest.mark.parametrize("name", [*PRESETS, *PLANNED])
def test_all_rows_have_the_same_budget(name: str) -> None:
    """Rows share data, steps, optimiser, schedule and widths. They differ in the model, the loss and the anchor."""
    experiment = experiment_of(name)
    groups = {setting: field.metadata["group"] for setting, field in settings.fields_of(TrainConfig).items()}
    chosen = {name for choice in (experiment.grid.choices.values() if experiment.grid else ()) for name in choice}
    chosen |= ALSO_DIFFER.get(name, set())
    budgets, widths = [], set()
    for runs in experiment.rows.values():
        # The runs of a row differ in the seed alone.
        train = experiment.identity(runs[0])["train"]
        widths.add(train["model_options"]["embed_dim"])
        kept = {setting for setting, group in groups.items() if group in (DATA, MACHINE, OPTIMIZER, OUTPUT)}
        budgets.append({k: v for k, v in train.items() if k in kept - {"seed", *chosen}})
    assert len(widths) == 1
    assert {"epochs", "batch_size", "lr", "lr_schedule"} - chosen <= set(budgets[0])
    assert all(budget == budgets[0] for budget in budgets)


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_list_has_models_and_results_of_trials_at_most(name: str) -> None:
    """Every row names a model that its settings can create. Names of results are not taken by other experiments."""
    experiment = experiment_of(name)
    assert Path(name).name not in PRESETS
    folder = ROOT / "benchmarks" / "results" / "experiments" / Path(name).name
    trials = {f"{one.file_name}.json": one for runs in experiment.rows.values() for run in runs for one in run.tried()}
    for path in folder.glob("*"):
        assert result_of(experiment, trials[path.name], folder) is not None
    for runs in experiment.rows.values():
        config = runs[0].config("data", Path("runs/planned"))
        options = {**config.model_options, "vocab_size": 9, "feature_dim": 432}
        if config.conversions is None:
            models.create(config.model, **options)
        else:
            models.create("fdf", host=config.model, host_options=options, conversions=config.conversions)


def test_the_results_are_small_and_say_what_they_are() -> None:
    for name in PRESETS:
        experiment = experiment_of(name)
        runs = [run for runs in experiment.rows.values() for run in runs]
        names = {run.file_name: run.row for one in runs for run in (one, *one.tried())}
        names |= {ensemble.file_name: ensemble.name for ensemble in experiment.ensembles}
        for path in (ROOT / "benchmarks" / "results" / "experiments" / name).glob("*"):
            assert path.suffix == ".json"
            assert path.stat().st_size < 40_000
            assert json.loads(path.read_text())["identity"]["row"] == names[path.stem]
