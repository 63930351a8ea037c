"""The RUN folder: what lies where, and when a run may write into it.

RUN/config.json, RUN/model.safetensors   the best model, what `itm_fast.models.load` takes
RUN/vocab.json                           the vocabulary of its captions
RUN/train.yaml                           the settings of the run
RUN/last/checkpoint.pt                   all that `--resume` needs
RUN/metrics.jsonl                        one line per log step and per validation
"""

from __future__ import annotations

from pathlib import Path

from itm_fast import config as settings
from itm_fast import files
from itm_fast.training.checkpoint import STATE_FILE
from itm_fast.training.config import TrainConfig, read_yaml, to_yaml

__all__ = ["CONFIG", "METRICS", "VOCABULARY", "prepare", "saved_config"]

CONFIG = "train.yaml"
METRICS = "metrics.jsonl"
VOCABULARY = "vocab.json"


def saved_config(run: str | Path) -> TrainConfig:
    """The settings that a run was started with."""
    path = Path(run) / CONFIG
    if not path.is_file():
        raise ValueError(f"{run}: holds no {CONFIG}; there is no run to resume")
    return settings.build(TrainConfig, read_yaml(path), "setting")


def prepare(config: TrainConfig, *, resume: bool) -> Path:
    """Creates the folder of a run, or checks that `config` may continue the one that is there.

    Raises:
        ValueError: the folder holds a run and `resume` is False, or that run has other settings (the first is named).
    """
    run = Path(config.out)
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run}: expected a folder for the run, found a file")
    started = run / CONFIG
    if started.is_file():
        differing = _first_difference(saved_config(run), config)
        if differing is not None and (resume or (run / STATE_FILE).is_file()):
            name, before, now = differing
            raise ValueError(
                f"{run}: holds a run with {name} = {before!r}, not {now!r}; choose another --out or the same settings"
            )
        if not resume and (run / STATE_FILE).is_file():
            raise ValueError(f"{run}: holds a run already; continue it with --resume or choose another --out")
    elif resume:
        raise ValueError(f"{run}: holds no {CONFIG}; there is no run to resume")
    if not resume:
        # A run that ended before its first state left nothing worth keeping.
        (run / METRICS).unlink(missing_ok=True)
    files.write_text(started, to_yaml(config))
    return run


def _first_difference(before: TrainConfig, now: TrainConfig) -> tuple[str, object, object] | None:
    for name, field in settings.fields_of(TrainConfig).items():
        old, new = getattr(before, name), getattr(now, name)
        if old != new and not field.metadata["free_on_resume"]:
            return name, old, new
    return None
