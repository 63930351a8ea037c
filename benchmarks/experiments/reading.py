"""Read the experiments of `python -m benchmarks.experiments` from YAML files.

Inside: `read`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.experiments.files import BUNDLED, MEASURES, Claim, Ensemble, Experiment, Figure, Grid, Run
from itm_fast import config as settings
from itm_fast.files.documents import MAX_SETTINGS_BYTES, parse_yaml, read_text
from itm_fast.files.messages import shown
from itm_fast.training import recipes

__all__ = ["read"]

_KEYS = {
    "title": str,
    "data": str,
    "split": str,
    "images": int,
    "train_images": int,
    "seeds": list,
    "train": dict,
    "rows": list,
    "equal": list,
    "grid": dict,
    "claims": list,
    "ensembles": list,
    "figures": list,
}
_ROW_KEYS = {
    "name": str, "train": dict, "seeds": list, "anchor_row": str, "start_row": str, "grid_row": str, "choices": dict,
}  # fmt: skip
_GRID_KEYS = {"seed": int, "choices": dict}
_CLAIM_KEYS = {"text": str, "row": str, "over": str, "of": str, "late": bool}
_ENSEMBLE_KEYS = {"name": str, "row": str, "seeds": list}
_ENSEMBLE_OF_ROWS = {"name": str, "rows": list, "seed": int}
_ENSEMBLE_GROUPS = {"name": str, "row": str, "groups": list}
_FIGURE_KEYS = {"file": str, "shows": str, "text": str, "rows": list, "seed": int}
_ROLES = ("anchor", "start")  # How a row can use the models of another one.
_LATE = " †"  # After claims that were listed after their runs.
_SHOWN = ("training", "scores")  # What a figure can show of its rows.


def read(path: Path) -> Experiment:
    """Read an experiment from a YAML file; ValueError naming the file and the problem."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = _checked(parse_yaml(read_text(path, MAX_SETTINGS_BYTES)), _KEYS, "setting", ("title", "data", "rows"))
        seeds, common = content.get("seeds", [0]), content.get("train", {})
        grid = _grid(content["grid"]) if "grid" in content else None
        rows: dict[str, list[Run]] = {}
        for number, entry in enumerate(content["rows"], start=1):
            row = _checked(entry, _ROW_KEYS, f"setting of row {number}", ("name",))
            if row["name"] in rows:
                raise ValueError(f"rows: {shown(row['name'])} appears twice")
            train = recipes.merge(common, row.get("train", {}))
            if not row.get("seeds", seeds):
                raise ValueError(f"seeds of {shown(row['name'])}: expected at least one, got []")
            role, anchors = _anchors(row, train, rows)
            choices, tried = _trials(row, train, grid, rows)
            rows[row["name"]] = [
                Run(row["name"], seed, train, anchors.get(seed), role, tried, choices, pending=bool(tried))
                for seed in row.get("seeds", seeds)
            ]
            if anchors and None in (run.anchor for run in rows[row["name"]]):
                raise ValueError(f"{role}_row: {shown(row[f'{role}_row'])} lacks a seed of {shown(row['name'])}")
        experiment = Experiment(
            path, content["title"], content["data"], content.get("split", "test"), content.get("images"),
            content.get("train_images"), rows,
            [_pair(pair, rows) for pair in content.get("equal", [])],
            [one for entry in content.get("ensembles", []) for one in _ensembles(entry, rows)],
            [_figure(entry, rows) for entry in content.get("figures", [])],
            [_claim(entry, [*rows, *_groups(content)]) for entry in content.get("claims", [])], grid,
        )  # fmt: skip
        if experiment.train_images is not None and experiment.data != BUNDLED:
            raise ValueError("train_images: only applies to the bundled data (data: emoji)")
        for name in (named := [entry["name"] for entry in content.get("ensembles", [])]):
            if named.count(name) > 1:
                raise ValueError(f"ensembles: {shown(name)} appears twice")
        names = [run.file_name for runs in rows.values() for run in runs]
        names += {trial.file_name for runs in rows.values() for run in runs for trial in run.trials}
        names += [ensemble.file_name for ensemble in experiment.ensembles]
        if len(set(names)) != len(names):
            raise ValueError("rows: two runs would write the same result file; change a name")
        for runs in rows.values():
            for run in runs:
                for one in (run, *run.trials):
                    experiment.identity(one)
        return experiment
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(content: Any, kinds: Mapping[str, type], what: str, required: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"expected names and values, got {shown(content)}")
    for name, value in content.items():
        if name not in kinds:
            raise ValueError(settings.unknown_name(what, str(name), list(kinds)))
        if type(value) is not kinds[name]:
            raise ValueError(f"{name}: expected a {kinds[name].__name__}, got {shown(value)}")
    for name in required:
        if name not in content:
            raise ValueError(f"{name}: this {what} is required")
    return content


def _pair(pair: Any, rows: Mapping[str, Any]) -> tuple[str, str]:
    if not isinstance(pair, list) or len(pair) != 2 or not set(map(str, pair)) <= set(rows):
        raise ValueError(f"equal: expected two names of rows, got {shown(pair)}")
    return pair[0], pair[1]


def _ensembles(entry: Any, rows: Mapping[str, list[Run]]) -> list[Ensemble]:
    if isinstance(entry, dict) and "rows" in entry:
        return [_ensemble_of_rows(entry, rows)]
    if isinstance(entry, dict) and "groups" in entry:
        content = _checked(entry, _ENSEMBLE_GROUPS, "setting of ensembles", tuple(_ENSEMBLE_GROUPS))
        if not content["groups"]:
            raise ValueError(f"groups of {shown(content['name'])}: expected at least one list of seeds, got []")
        groups = [_of_seeds(content, group, rows) for group in content["groups"]]
        seeds = [run.seed for members in groups for run in members]
        if len(set(seeds)) != len(seeds):
            raise ValueError(f"groups of {shown(content['name'])}: expected each seed once, got {shown(seeds)}")
        return [Ensemble(content["name"], members, members[0].seed) for members in groups]
    content = _checked(entry, _ENSEMBLE_KEYS, "setting of an ensemble", tuple(_ENSEMBLE_KEYS))
    return [Ensemble(content["name"], _of_seeds(content, content["seeds"], rows))]


def _of_seeds(content: Mapping[str, Any], seeds: Any, rows: Mapping[str, list[Run]]) -> list[Run]:
    known = {run.seed: run for run in rows.get(content["row"], [])}
    several = isinstance(seeds, list) and len(seeds) > 1 and len(set(map(str, seeds))) == len(seeds)
    if not several or not all(seed in known for seed in seeds):
        raise ValueError(
            f"seeds of {shown(content['name'])}: expected several seeds of the row {shown(content['row'])}, "
            f"got {shown(seeds)}"
        )
    return [known[seed] for seed in seeds]


def _ensemble_of_rows(entry: dict[str, Any], rows: Mapping[str, list[Run]]) -> Ensemble:
    content = _checked(entry, _ENSEMBLE_OF_ROWS, "setting of an ensemble of rows", ("name", "rows"))
    names, seed = content["rows"], content.get("seed", 0)
    known = {name: run for name, runs in rows.items() for run in runs if run.seed == seed}
    if len(names) < 2 or len(set(map(str, names))) != len(names) or not all(name in known for name in names):
        raise ValueError(
            f"rows of {shown(content['name'])}: expected several rows with seed {seed}, got {shown(names)}"
        )
    return Ensemble(content["name"], [known[name] for name in names])


def _anchors(
    row: Mapping[str, Any], train: Mapping[str, Any], rows: Mapping[str, list[Run]]
) -> tuple[str, dict[int, Run]]:
    """Return how `row` uses the runs of an earlier one of `rows`, as anchor or start, and these by seed."""
    for name in _ROLES:
        if name in train:
            raise ValueError(
                f"{name}: expected {name}_row, the name of a row, because the content of a folder may change"
            )
    if train.get("scenario") == "oas" and "anchor_row" not in row:
        raise ValueError(f"anchor_row: the row {shown(row['name'])} with the scenario oas needs one")
    named = [name for name in _ROLES if f"{name}_row" in row]
    if len(named) > 1:
        raise ValueError(f"start_row: expected no anchor_row beside it in {shown(row['name'])}")
    if not named:
        return _ROLES[0], {}
    found = row[f"{named[0]}_row"]
    if found not in rows:
        raise ValueError(f"{named[0]}_row: expected the name of a row above it, got {shown(found)}")
    return named[0], {run.seed: run for run in rows[found]}


def _grid(content: Any) -> Grid:
    grid = _checked(content, _GRID_KEYS, "setting of the grid", tuple(_GRID_KEYS))
    if len(grid["choices"]) < 2 or not all(isinstance(choice, dict) for choice in grid["choices"].values()):
        raise ValueError(f"choices: expected at least two labels with settings, got {shown(grid['choices'])}")
    return Grid(grid["seed"], grid["choices"])


def _trials(
    row: Mapping[str, Any], train: Mapping[str, Any], grid: Grid | None, rows: Mapping[str, list[Run]]
) -> tuple[Mapping[str, Any], tuple[Run, ...]]:
    """Return the choices of the grid for a row, and their runs. A row with a `grid_row` has those of that row.

    If the settings of an anchor or a start are fixed, trials use its run with the grid's seed.
    """
    if "grid_row" in row:
        if grid is None or row["grid_row"] not in rows:
            raise ValueError(f"grid_row: expected the name of a row above it, got {shown(row['grid_row'])}")
        first = rows[row["grid_row"]][0]
        return first.choices, first.trials
    if grid is None or row.get("choices") == {}:
        return {}, ()
    role = next((role for role in _ROLES if f"{role}_row" in row), _ROLES[0])
    other = rows[row[f"{role}_row"]][0] if f"{role}_row" in row else None
    if other is not None and (other.trials or other.anchor):
        raise ValueError(
            f"{row['name']}: expected grid_row, or as {role}_row one with 'choices: {{}}' and no anchor or start"
        )
    anchor = None if other is None else attrs.evolve(other, seed=grid.seed)
    choices = _grid({"seed": grid.seed, "choices": row.get("choices", grid.choices)}).choices
    if len(choices) != len(grid.choices):
        raise ValueError(
            f"choices of {shown(row['name'])}: expected {len(grid.choices)} as in the grid, got {len(choices)}"
        )
    name = row["name"]
    return choices, tuple(
        Run(f"{name}, {label}", grid.seed, recipes.merge(train, choice), anchor, role)
        for label, choice in choices.items()
    )


def _groups(content: Mapping[str, Any]) -> list[str]:
    """Return the names of ensembles that have seeds, so that claims can name them."""
    return [entry["name"] for entry in content.get("ensembles", []) if "groups" in entry]


def _claim(entry: Any, rows: Sequence[str]) -> Claim:
    content = _checked(entry, _CLAIM_KEYS, "setting of a claim", ("text", "row", "over"))
    for name in (content["row"], content["over"]):
        if name not in rows:
            raise ValueError(settings.unknown_name("row of a claim", name, rows))
    if content.get("of", "rsum") not in MEASURES:
        raise ValueError(settings.unknown_name("measure of a claim", content["of"], list(MEASURES)))
    text = f"{content['text']}{_LATE if content.get('late') else ''}"
    return Claim(text, content["row"], content["over"], content.get("of", "rsum"))


def _figure(entry: Any, rows: Mapping[str, list[Run]]) -> Figure:
    content = _checked(entry, _FIGURE_KEYS, "setting of a figure", ("file", "shows", "text", "rows"))
    if not re.fullmatch(r"[\w-]+\.svg", content["file"]):
        raise ValueError(f"file: expected the name of an SVG file, got {shown(content['file'])}")
    if content["shows"] not in _SHOWN:
        raise ValueError(f"shows: expected {' or '.join(_SHOWN)}, got {shown(content['shows'])}")
    seed = content.get("seed", 0)
    known = {run.row: run for runs in rows.values() for run in runs if run.seed == seed}
    for name in content["rows"]:
        if name not in known:
            raise ValueError(f"rows of {content['file']}: expected rows with seed {seed}, got {shown(name)}")
    return Figure(content["file"], content["shows"], content["text"], [known[name] for name in content["rows"]])
