"""Trackers: other programs that show the numbers of a run's log.

Inside: `Tracker`, `tracker_folders`, `trackers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from itm_fast import config as settings
from itm_fast.files.run_files import TENSORBOARD
from itm_fast.training.config import TrainConfig
from itm_fast.training.mlflow_log import MlflowLog
from itm_fast.training.tensorboard import TensorBoardLog
from itm_fast.training.tracker_run import Ending
from itm_fast.training.wandb_log import WandbLog

__all__ = ["Tracker", "tracker_folders", "trackers"]

_OTHERS: dict[str, type[WandbLog] | type[MlflowLog]] = {"wandb": WandbLog, "mlflow": MlflowLog}


class Tracker(Protocol):
    """Takes the lines of a log."""

    def start(self, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Begin with the `lines` of a log of `seconds` of training; there are none if the run is new."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""

    def close(self, ending: Ending) -> None:
        """Write what is buffered, and how the training ended."""


def tracker_folders(config: TrainConfig) -> list[str]:
    """Return the folders in the run directory that the trackers of a run write."""
    chosen = dict.fromkeys(["tensorboard"] * config.tensorboard + [config.tracker] * (config.tracker is not None))
    return [TENSORBOARD if name == "tensorboard" else _OTHERS[str(name)].folder for name in chosen]


def trackers(config: TrainConfig) -> list[Tracker]:
    """Create the trackers of a run. Nothing is written.

    Raises:
        ValueError: the package of a tracker is not installed, or `tracker_online` has nothing to send to.
    """
    if config.tracker_online and config.tracker not in _OTHERS:
        raise ValueError(
            f"tracker_online: expected with a tracker that has a server ({' or '.join(_OTHERS)}), got "
            f"{config.tracker or 'none'}"
        )
    found: list[Tracker] = []
    if config.tensorboard or config.tracker == "tensorboard":
        found.append(TensorBoardLog(Path(config.out) / TENSORBOARD))
    if config.tracker is not None and config.tracker in _OTHERS:
        found.append(_OTHERS[config.tracker](config.out, settings.to_dict(config), online=config.tracker_online))
    return found
