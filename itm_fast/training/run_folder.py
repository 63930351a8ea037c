"""The run directory: when a run may write into it. `itm_fast.files.run_files` lists its files.

Inside: `check`, `check_paths`, `lost_model`, `prepare`, `saved_config`, `with_saved_defaults`, `save_models`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from itm_fast import config as settings
from itm_fast.data import Vocabulary
from itm_fast.files import atomic, regular
from itm_fast.files.messages import shown
from itm_fast.files.run_files import BRANCHES, CONFIG, DISCRIMINATORS, METRICS, PATHS, TRACKERS, VOCABULARY
from itm_fast.models.base import CONFIG_FILE, WEIGHTS_FILE, MatchingModel
from itm_fast.training.checkpoint import STATE_FILE
from itm_fast.training.config import TrainConfig, read_yaml, to_yaml
from itm_fast.training.lock import LOCK_FILE
from itm_fast.training.trackers import tracker_folders

__all__ = [
    "CONFIG",
    "METRICS",
    "VOCABULARY",
    "check",
    "check_paths",
    "lost_model",
    "prepare",
    "save_models",
    "saved_config",
    "with_saved_defaults",
]


_BRANCH_FILES = (VOCABULARY, WEIGHTS_FILE, CONFIG_FILE)


def saved_config(run: str | Path) -> TrainConfig:
    """Read the settings that a run was started with.

    If a path no longer exists, the same path relative to the run directory is used: both may have moved together.

    Raises:
        ValueError: the file is missing or damaged. The message names it.
    """
    path = Path(run) / CONFIG
    if not regular.is_file(path):
        raise ValueError(f"{run}: holds no {CONFIG}; there is no run to resume")
    values = read_yaml(path, quiet=True)
    values |= {name: _found(values[name], values.get("out"), Path(run)) for name in PATHS if name in values}
    try:
        return settings.build(TrainConfig, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_paths(run: str | Path, config: TrainConfig, given: Container[str]) -> None:
    """Check the paths in the settings of a run that resuming reads, except those `given` as options.

    Raises:
        ValueError: a path does not exist. The message names the entry of the settings and the option.
    """
    for name, path in _paths(config).items():
        field = settings.fields_of(TrainConfig)[name]
        if field.metadata["free_on_resume"] and name != "out" and name not in given and not Path(path).exists():
            option = f"--{name.replace('_', '-')} {field.metadata['metavar']}"
            raise ValueError(f"{Path(run) / CONFIG}: {name}: {path} does not exist; if it was moved, add {option}")


def with_saved_defaults(config: TrainConfig) -> TrainConfig:
    """Return the settings of a run to resume with its warm-up if they name none, as the default follows the epochs."""
    if config.warmup_epochs is not None:
        return config
    return attrs.evolve(config, warmup_epochs=saved_config(config.out).resolved().warmup_epochs)


def check(config: TrainConfig, *, resume: bool) -> None:
    """Check that the run may write into its directory. Nothing is written.

    Raises:
        ValueError: the directory is that of the data, cannot be written, or has files that are not from a run with
            these settings. With `resume`: it has no run, or one with other settings (the first difference is named).
    """
    run = Path(config.out)
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run}: expected a folder for the run, found a file")
    if config.data is not None and run.resolve() == Path(config.data).resolve():
        raise ValueError(f"out: expected another folder than that of the data, got {run}")
    for folder in (run, (run / STATE_FILE).parent):
        atomic.check_folder(folder, run)
    atomic.check_entries(run, _written(run))
    started, has_state = regular.is_file(run / CONFIG), regular.is_file(run / STATE_FILE)
    if resume and not started:
        raise ValueError(f"{run}: holds no {CONFIG}; there is no run to resume")
    differing = _first_difference(saved_config(run), config) if started and (resume or has_state) else None
    if differing is not None:
        name, before, now = differing
        raise ValueError(
            f"{run}: holds a run with {name} = {shown(before)}, not {shown(now)}; choose another --out, or continue "
            "the run with --resume and the same settings"
        )
    if resume:
        return
    if started and has_state:
        raise ValueError(f"{run}: already contains a run; continue it with --resume or choose another --out")
    # A run that ended before its first state left nothing worth keeping: its settings, vocabulary and log.
    model = [WEIGHTS_FILE, CONFIG_FILE, *[BRANCHES] * (config.scenario in ("oss", "mss", "ncr"))]
    kept = model if started else [*model, VOCABULARY, METRICS, str(STATE_FILE), *tracker_folders(config)]
    if not started:
        kept += sorted(str(path.relative_to(run)) for path in (run / STATE_FILE).parent.glob(DISCRIMINATORS))
    for file in kept:
        if (run / file).exists():
            raise ValueError(f"{run}: holds {file}, which this run would overwrite; choose another --out")


def prepare(config: TrainConfig, *, resume: bool) -> Path:
    """Create the run directory after `check`, and write the settings; a new run starts a new log.

    Temporary files of killed writers are removed, so `lock` must be held.
    """
    run = Path(config.out)
    for name in (CONFIG, VOCABULARY, WEIGHTS_FILE, CONFIG_FILE, STATE_FILE):
        atomic.remove_temporaries(run / name, run)
    for branch in (run / BRANCHES).glob("*"):
        for name in _BRANCH_FILES:
            atomic.remove_temporaries(branch / name, run)
    atomic.remove_matching((run / STATE_FILE).with_name(f".{DISCRIMINATORS}"), run)
    if not resume:
        (run / METRICS).unlink(missing_ok=True)
    absolute: dict[str, Any] = {name: _absolute(path) for name, path in _paths(config).items()}
    atomic.write_text(run / CONFIG, to_yaml(attrs.evolve(config, **absolute).resolved()))
    return run


def save_models(
    run: str | Path, target: MatchingModel, others: Sequence[MatchingModel], words: Vocabulary | None
) -> None:
    """Write the best model into the run directory, and `others` of the same step into `branches/1`, `branches/2`, ...

    The model itself is written last. Until its validation is in the log, a resumed run writes all of them again.
    """
    for number, model in enumerate(others, start=1):
        folder = Path(run) / BRANCHES / str(number)
        vocabulary = {} if words is None or not words.saveable else {VOCABULARY: words.to_json().encode()}
        for name, content in {**vocabulary, **model.file_contents()}.items():
            atomic.write_bytes(folder / name, content, run)
    # The model has no tokenizer while it trains; the vocabulary of the run stays.
    words_file = Path(run) / VOCABULARY
    target.save(run, beside={VOCABULARY: regular.read_bytes(words_file)} if regular.is_file(words_file) else {})


def lost_model(run: str | Path, target: MatchingModel, others: Sequence[MatchingModel]) -> str | None:
    """Return why the best model, or one of the `others` saved with it, cannot be read; None if all can."""
    branches = [Path(run) / BRANCHES / str(number) for number in range(1, len(others) + 1)]
    for model, folder in zip((target, *others), (Path(run), *branches), strict=True):
        for name in model.saved_files:
            if not regular.is_present(folder / name):
                return f"{folder / name}: gone"
        try:
            with torch.random.fork_rng(devices=[]):  # The run goes on from the state of torch's generator.
                model.check_saved(folder)
        except (ValueError, OSError) as error:
            return str(error)
    return None


def _written(run: Path) -> list[Path]:
    """Return the paths in `run` that a run writes."""
    last, branches = STATE_FILE.parent, Path(BRANCHES)
    return [
        *map(Path, (CONFIG, VOCABULARY, METRICS, *TRACKERS, BRANCHES, WEIGHTS_FILE, CONFIG_FILE)),
        *(last / name for name in (LOCK_FILE.name, STATE_FILE.name)),
        *(path.relative_to(run) for path in (run / last).glob(DISCRIMINATORS)),
        *(branches / one.name / name for one in (run / branches).glob("*") for name in _BRANCH_FILES),
    ]


def _first_difference(before: TrainConfig, now: TrainConfig) -> tuple[str, object, object] | None:
    before, now = before.resolved(), now.resolved()
    places = [{name: os.path.realpath(path) for name, path in _paths(one).items()} for one in (before, now)]
    for name, field in settings.fields_of(TrainConfig).items():
        old, new = getattr(before, name), getattr(now, name)
        differs = places[0][name] != places[1][name] if name in places[0] and name in places[1] else old != new
        if differs and not field.metadata["free_on_resume"]:
            return name, old, new
    return None


def _paths(config: TrainConfig) -> dict[str, str]:
    return {name: path for name in PATHS if (path := getattr(config, name)) is not None}


def _absolute(path: str | Path) -> str:
    # Path.resolve would follow links, which may later lead elsewhere.
    return os.path.normpath(Path(path).absolute())


def _found(path: Any, out: Any, run: Path) -> Any:
    """Return the present place of a path in the settings of `run`, which name `out` as the run directory."""
    if not isinstance(path, str) or not isinstance(out, str) or Path(path).is_absolute() != Path(out).is_absolute():
        return path
    # Earlier versions stored paths relative to a working directory that is unknown now.
    if Path(path).is_absolute() and Path(path).exists():
        return path
    try:
        beside = _absolute(run / os.path.relpath(path, out))
    except ValueError:  # An empty path, or another drive on Windows.
        return path
    return beside if Path(beside).exists() else path
