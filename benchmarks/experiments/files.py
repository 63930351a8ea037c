"""The experiments of `python -m benchmarks.experiments` as objects: runs, grids, claims, ensembles and figures.

Inside: `Run`, `Grid`, `Claim`, `Ensemble`, `Figure`, `Experiment`, `kept_settings`, `sha256`, `shown_path`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
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
from itm_fast.training import TrainConfig

__all__ = [
    "BUNDLED", "MEASURES", "ROOT", "Claim", "Ensemble", "Experiment", "Figure", "Grid", "Run", "kept_settings",
    "sha256", "shown_path",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
BUNDLED = "emoji"  # As `data`: the bundled data.

# Settings that change a run's result at most by rounding; the paths of data and run directory are added later.
_FREE = ("data", "out", "workers", "save_every", "tensorboard", "tracker", "tracker_online", "device", "threads")
MEASURES = {
    "rsum": "sum of recalls", "mean_distance": "MD", "i2t_r1": "R@1, image to text", "t2i_r1": "R@1, text to image",
}  # fmt: skip


@attrs.frozen
class Run:
    """One training: a row of the table with one seed, optionally with another run's model as its anchor or its start.

    `trials` are the runs of the grid, one for each of the `choices` of settings. The run is `pending` until all have
    results; then `winner` is the label of the best choice.
    """

    row: str
    seed: int
    train: Mapping[str, Any]
    anchor: Run | None = None
    role: str = "anchor"  # The setting that takes the folder of `anchor`: anchor or start.
    trials: tuple[Run, ...] = ()
    choices: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    pending: bool = False
    winner: str = ""

    @property
    def file_name(self) -> str:
        return f"{_file_name(self.row)}-seed{self.seed}"

    def config(self, data: str, out: Path, **machine: Any) -> TrainConfig:
        """Return the settings of a training into the folder `out`; the anchor's folder is next to it."""
        anchor = {} if self.anchor is None else {self.role: str(out.parent / self.anchor.file_name)}
        places = {"data": data, "out": str(out), **anchor}
        return settings.build(TrainConfig, {**self.train, **places, "seed": self.seed, **machine})

    def in_order(self) -> list[Run]:
        """Return this run, preceded by its anchor."""
        return [*([] if self.anchor is None else self.anchor.in_order()), self]

    def tried(self) -> list[Run]:
        """Return the trials, each preceded by its anchor."""
        return [one for trial in self.trials for one in trial.in_order()]


@attrs.frozen
class Grid:
    """Settings that each row chooses among on the validation split, by their labels, with a seed of their own."""

    seed: int
    choices: Mapping[str, Mapping[str, Any]]


@attrs.frozen
class Claim:
    """The claim that a measure (`of`) of a row, or of ensembles, is greater than that of another with the same seed."""

    text: str
    row: str
    over: str
    of: str


@attrs.frozen
class Ensemble:
    """The mean scores of several runs, of one row or of several, as a row of the table.

    Of several ensembles with one name, each has the `seed` of its first run, by which claims pair it with other rows.
    """

    name: str
    members: list[Run]
    seed: int | None = None

    @property
    def file_name(self) -> str:
        return _file_name(self.name) + ("" if self.seed is None else f"-seed{self.seed}")


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
    claims: list[Claim]
    grid: Grid | None
    known: dict[Any, Fingerprints] = attrs.field(factory=dict, eq=False, repr=False)  # Computed once, then kept.

    def ensembles_by_name(self) -> dict[str, list[Ensemble]]:
        """Return the ensembles of each name, in order."""
        found: dict[str, list[Ensemble]] = {}
        for ensemble in self.ensembles:
            found.setdefault(ensemble.name, []).append(ensemble)
        return found

    def identity(self, run: Run) -> dict[str, Any]:
        """Return all settings that determine the result of a run; data and the anchor's weights are separate."""
        kept = kept_settings(run.config(self.data, Path(run.file_name)))
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
        if key not in self.known:
            found = (
                bundled_fingerprints(self.train_images, config.validation_split, self.split)
                if self.data == BUNDLED
                else folder_fingerprints(config, self.split, self.images)
            )
            self.known[key] = {**found, **vision_fingerprints(config)}
        return self.known[key]


def kept_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a training that determine its result."""
    return {name: value for name, value in settings.to_dict(config.resolved()).items() if name not in _FREE}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shown_path(path: Path) -> str:
    """Return the path relative to the source root if it is below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else str(path)
