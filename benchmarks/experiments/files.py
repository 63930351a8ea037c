"""The experiments of `python -m benchmarks.experiments`: parse YAML files and read existing results.

Inside: `Run`, `Ensemble`, `Figure`, `Experiment`, `read`, `result_of`, `weights_of`, `sha256`,
`shown_path`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from benchmarks.experiments.data import (
    Fingerprints,
    bundled_fingerprints,
    folder_fingerprints,
    vision_fingerprints,
)
from itm_fast import config as settings
from itm_fast.files.documents import MAX_SETTINGS_BYTES, parse_yaml, read_json, read_text
from itm_fast.files.messages import shown
from itm_fast.training import TrainConfig, recipes

__all__ = [
    "ANCHOR", "BUNDLED", "ROOT", "Ensemble", "Experiment", "Figure", "Run", "read", "result_of", "sha256",
    "shown_path", "weights_of",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
BUNDLED = "emoji"  # As `data`: the bundled data.

# Settings that change a run's result at most by rounding; the paths of data and run directory are added later.
_FREE = ("data", "out", "workers", "save_every", "tensorboard", "tracker", "tracker_online", "device", "threads")
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
    "ensembles": list,
    "figures": list,
}
_ROW_KEYS = {"name": str, "train": dict, "seeds": list, "anchor_row": str}
_ENSEMBLE_KEYS = {"name": str, "row": str, "seeds": list}
_FIGURE_KEYS = {"file": str, "shows": str, "text": str, "rows": list, "seed": int}
_SHOWN = ("training", "scores")  # What a figure can show of its rows.
ANCHOR = "anchor"  # In fingerprints, next to the purposes of data.
_ADVICE = "move it away to measure again, or undo the change"


@attrs.frozen
class Run:
    """One training: a row of the table with one seed, optionally with another run's model as its anchor."""

    row: str
    seed: int
    train: Mapping[str, Any]
    anchor: Run | None = None

    @property
    def file_name(self) -> str:
        return f"{_file_name(self.row)}-seed{self.seed}"

    def config(self, data: str, out: Path, **machine: Any) -> TrainConfig:
        """Return the settings of a training into the folder `out`; the anchor's folder is next to it."""
        anchor = {} if self.anchor is None else {"anchor": str(out.parent / self.anchor.file_name)}
        places = {"data": data, "out": str(out), **anchor}
        return settings.build(TrainConfig, {**self.train, **places, "seed": self.seed, **machine})

    def in_order(self) -> list[Run]:
        """Return this run, preceded by its anchor."""
        return [*([] if self.anchor is None else self.anchor.in_order()), self]


@attrs.frozen
class Ensemble:
    """The mean scores of several runs of one row, as a row of the table."""

    name: str
    members: list[Run]

    @property
    def file_name(self) -> str:
        return _file_name(self.name)


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@attrs.frozen
class Figure:
    """A figure of rows of an experiment with one seed, as SVG in the documentation's image folder."""

    file: str
    shows: str
    text: str
    runs: list[Run]

    @property
    def path(self) -> Path:
        return IMAGES / self.file


@attrs.frozen
class Experiment:
    """The content of a YAML file."""

    path: Path
    title: str
    data: str
    split: str
    images: int | None
    train_images: int | None
    rows: Mapping[str, list[Run]]
    equal: list[tuple[str, str]]
    ensembles: list[Ensemble]
    figures: list[Figure]
    _known: dict[Any, Fingerprints] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def identity(self, run: Run) -> dict[str, Any]:
        """Return all settings that determine the result of a run; data and the anchor's weights are separate."""
        kept = _kept(run.config(self.data, Path(run.file_name)))
        found = {
            "row": run.row,
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "train_images": self.train_images,
            "train": kept,
        }
        return found if run.anchor is None else {**found, "anchor": self.identity(run.anchor)}

    def fingerprints(self, run: Run) -> Fingerprints | None:
        """Return the fingerprints of a run's data and vision model, read once; None if a folder is missing.

        Raises:
            ValueError: the data are damaged, or lack what the run reads.
        """
        config = run.config(self.data, Path(run.file_name))
        folders = [config.image_backbone, None if self.data == BUNDLED else self.data]
        if not all(folder is None or Path(folder).is_dir() for folder in folders):
            return None
        key = (
            config.vocab, config.min_count, config.text_augmentation > 0, config.validation_split,
            config.validation_images, config.image_backbone,
        )  # fmt: skip
        if key not in self._known:
            found = (
                bundled_fingerprints(self.train_images, config.validation_split, self.split)
                if self.data == BUNDLED
                else folder_fingerprints(config, self.split, self.images)
            )
            self._known[key] = {**found, **vision_fingerprints(config)}
        return self._known[key]


def _kept(config: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in settings.to_dict(config).items() if name not in _FREE}


def read(path: Path) -> Experiment:
    """Read an experiment from a YAML file; ValueError naming the file and the problem."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = _checked(parse_yaml(read_text(path, MAX_SETTINGS_BYTES)), _KEYS, "setting", ("title", "data", "rows"))
        seeds, common = content.get("seeds", [0]), content.get("train", {})
        rows: dict[str, list[Run]] = {}
        for number, entry in enumerate(content["rows"], start=1):
            row = _checked(entry, _ROW_KEYS, f"setting of row {number}", ("name",))
            if row["name"] in rows:
                raise ValueError(f"rows: {shown(row['name'])} appears twice")
            train = recipes.merge(common, row.get("train", {}))
            anchors = _anchors(row, train, rows)
            rows[row["name"]] = [Run(row["name"], seed, train, anchors.get(seed)) for seed in row.get("seeds", seeds)]
            if anchors and None in (run.anchor for run in rows[row["name"]]):
                raise ValueError(f"anchor_row: {shown(row['anchor_row'])} lacks a seed of {shown(row['name'])}")
        experiment = Experiment(
            path, content["title"], content["data"], content.get("split", "test"), content.get("images"),
            content.get("train_images"), rows,
            [_pair(pair, rows) for pair in content.get("equal", [])],
            [_ensemble(entry, rows) for entry in content.get("ensembles", [])],
            [_figure(entry, rows) for entry in content.get("figures", [])],
        )  # fmt: skip
        if experiment.train_images is not None and experiment.data != BUNDLED:
            raise ValueError("train_images: only applies to the bundled data (data: emoji)")
        names = [run.file_name for runs in rows.values() for run in runs]
        names += [ensemble.file_name for ensemble in experiment.ensembles]
        if len(set(names)) != len(names):
            raise ValueError("rows: two runs would write the same result file; change a name")
        for runs in rows.values():
            for run in runs:
                experiment.identity(run)
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


def _ensemble(entry: Any, rows: Mapping[str, list[Run]]) -> Ensemble:
    content = _checked(entry, _ENSEMBLE_KEYS, "setting of an ensemble", tuple(_ENSEMBLE_KEYS))
    known = {run.seed: run for run in rows.get(content["row"], [])}
    seeds = content["seeds"]
    if len(seeds) < 2 or len(set(map(str, seeds))) != len(seeds) or not all(seed in known for seed in seeds):
        raise ValueError(
            f"seeds of {shown(content['name'])}: expected several seeds of the row {shown(content['row'])}, "
            f"got {shown(seeds)}"
        )
    return Ensemble(content["name"], [known[seed] for seed in seeds])


def _anchors(row: Mapping[str, Any], train: Mapping[str, Any], rows: Mapping[str, list[Run]]) -> dict[int, Run]:
    """By seed, the anchor runs of `row`; `rows` are the earlier rows."""
    if "anchor" in train:
        raise ValueError("anchor: expected anchor_row, the name of a row, because the content of a folder may change")
    if "anchor_row" not in row:
        if train.get("scenario") == "oas":
            raise ValueError(f"anchor_row: the row {shown(row['name'])} with the scenario oas needs one")
        return {}
    if row["anchor_row"] not in rows:
        raise ValueError(f"anchor_row: expected the name of a row above it, got {shown(row['anchor_row'])}")
    return {run.seed: run for run in rows[row["anchor_row"]]}


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


def result_of(experiment: Experiment, run: Run, results: Path) -> dict[str, Any] | None:
    """Return the result of a run; None if it does not exist yet.

    Raises:
        ValueError: the file is damaged, or has other settings, other data, or an anchor with other weights; the
            message names the first difference.
    """
    path = results / f"{run.file_name}.json"
    if not path.exists():
        return None
    result = read_json(path, MAX_SETTINGS_BYTES, "a result as JSON")
    before = result.get("identity") if isinstance(result, dict) else None
    if not isinstance(before, dict) or not all(isinstance(before.get(n), dict) for n in ("train", "fingerprints")):
        raise ValueError(f"{path}: expected a result of an experiment, with its settings and what its data held")
    held = before["fingerprints"]
    before = _with_defaults({name: value for name, value in before.items() if name != "fingerprints"})
    for name, old, new in _differences(before, json.loads(json.dumps(experiment.identity(run)))):
        raise ValueError(f"{path}: was measured with {name} = {shown(old)}, not {shown(new)}; {_ADVICE}")
    now = experiment.fingerprints(run) or {use: content for use, content in held.items() if use != ANCHOR}
    anchor = None if run.anchor is None else result_of(experiment, run.anchor, results)
    # Without a result of the anchor, its weights are unknown.
    weights = held.get(ANCHOR) if anchor is None else weights_of(run, anchor)
    for name, _, _ in _differences(held, now if run.anchor is None else {**now, ANCHOR: weights}):
        raise ValueError(f"{path}: was measured with other content of {name}; {_ADVICE}")
    return result


def _with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Add settings that are newer than the file, with their defaults, also to those of the anchor."""
    train = settings.with_present_names(TrainConfig, identity["train"], quiet=True)
    found = {**identity, "train": {**_kept(TrainConfig(data="", out="")), **train}}
    anchor = identity.get("anchor")
    return {**found, "anchor": _with_defaults(anchor)} if isinstance(anchor, dict) and "train" in anchor else found


def weights_of(run: Run, anchor_result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a run's anchor that has this result."""
    return {f"the weights of {run.anchor.row}": anchor_result.get("weights")} if run.anchor else {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*now, *before]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new)
        elif old != new:
            yield name, old, new


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shown_path(path: Path) -> str:
    """Return the path relative to the source root if it is below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else str(path)
