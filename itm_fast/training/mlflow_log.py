"""The numbers of a run's log as a run of MLflow.

Inside: `MlflowLog`.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from itm_fast.files import atomic
from itm_fast.files.messages import shortened
from itm_fast.training.tracker_run import RUN_ID, Ending, keep_id, kept_id

__all__ = ["MlflowLog"]

Item = TypeVar("Item")
_EXPERIMENT = "itm_fast"
_SERVER = "MLFLOW_TRACKING_URI"
_STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# The limits of MLflow for one call, and for the text of a parameter.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500


class MlflowLog:
    """Write a run of MLflow into `RUN/mlflow/mlflow.db`, or with `online` to a server.

    A resumed run continues its run of MLflow. Values that MLflow already has are not added again, because it takes none
    back. Settings that changed become tags, because parameters cannot change. A run that was killed before its first
    save starts again, and its first run of MLflow is deleted.

    Args:
        run: the run directory.
        settings: settings of the run; they become parameters.
        online: send the log to the server that `MLFLOW_TRACKING_URI` names.

    Raises:
        ValueError: the optional package mlflow is not installed, or `MLFLOW_TRACKING_URI` is not set.
    """

    folder = "mlflow"

    def __init__(self, run: str | os.PathLike[str], settings: Mapping[str, Any], *, online: bool) -> None:
        if online and not os.environ.get(_SERVER):
            raise ValueError(
                f"tracker_online: expected the address of the MLflow server in {_SERVER}, which is not set"
            )
        if not online:
            # Otherwise MLflow would report its use to its authors.
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

            if not online:
                import alembic  # noqa: F401  The database of MLflow needs it.
        except ImportError:
            raise ValueError(
                "tracker: the package mlflow is not installed; install it with pip install 'itm_fast[mlflow]', or "
                "train without --tracker"
            ) from None
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric, self._param, self._make_client = Metric, Param, MlflowClient
        self._refused = MlflowException
        self._run, self._settings, self._online = Path(run), dict(settings), online
        if not online and set(str(self._run.resolve())) & set("?#%"):
            raise ValueError(f"out: MLflow cannot write to a path with ?, # or %, got {self._run}")
        self._client: Any = None
        self._id, self._started = "", 0.0
        self._last: dict[str, int] = {}  # The last step of each number that MLflow has.

    def start(self, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Start a run of MLflow with `lines`, the content of the log so far, or continue the one that had them.

        Args:
            lines: the lines; none if the run is new.
            seconds: the training time so far. Times are shifted as if the run had not paused.
        """
        self._started = time.time() - seconds
        experiment, folder = self._open(), self._run / self.folder
        known = self._known(kept_id(folder))
        if known is not None and not lines:
            # A run of MLflow that still counts as running is that of a training that was killed.
            if known.info.status == "RUNNING":
                self._client.delete_run(known.info.run_id)
            known = None
        self._last = {}
        if known is None:
            start = {"start_time": self._milliseconds(0), "run_name": self._run.resolve().name}
            known = self._client.create_run(experiment, **start)
        else:
            self._started = known.info.start_time / 1000
            self._client.update_run(known.info.run_id, status="RUNNING")
            self._last = {name: self._last_step(known.info.run_id, name) for name in known.data.metrics}
        self._id = known.info.run_id
        keep_id(folder, self._id, self._run)
        shown = {name: shortened(str(value), _CHARACTERS) for name, value in self._settings.items()}
        new = [self._param(name, text) for name, text in shown.items() if name not in known.data.params]
        for part in _parts(new, _PARAMETERS):
            self._client.log_batch(self._id, params=part)
        before = known.data.params | known.data.tags
        for name, text in shown.items():
            if before.get(name, text) != text:
                self._client.set_tag(self._id, name, text)
        for part in _parts([metric for line in lines for metric in self._metrics(line)], _METRICS):
            self._client.log_batch(self._id, metrics=part)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of the log."""
        if metrics := self._metrics(line):
            self._client.log_batch(self._id, metrics=metrics)

    def close(self, ending: Ending) -> None:
        """Give the run of MLflow the status of the training's ending."""
        if self._client is not None:
            self._client.set_terminated(self._id, _STATUS[ending])

    def _open(self) -> str:
        """Open the database or the server, and return the id of the experiment."""
        where: dict[str, str] = {}
        files: dict[str, str] = {}
        if not self._online:
            # MLflow opens the database by itself; this refuses links in place of the folder or the file.
            atomic.open_folder(self._run / self.folder, self._run).close()
            atomic.check_entries(self._run, [f"{self.folder}/mlflow.db", f"{self.folder}/{RUN_ID}"])
            folder = (self._run / self.folder).resolve()
            address = f"sqlite:///{folder / 'mlflow.db'}"
            where, files = {"tracking_uri": address, "registry_uri": address}, {"artifact_location": folder.as_uri()}
        self._client = self._make_client(**where)
        known = self._client.get_experiment_by_name(_EXPERIMENT)
        found: str = self._client.create_experiment(_EXPERIMENT, **files) if known is None else known.experiment_id
        return found

    def _known(self, run_id: str | None) -> Any:
        """Return the run of MLflow with an id; None if there is none."""
        try:
            found = None if run_id is None else self._client.get_run(run_id)
        except self._refused:
            return None
        return found if found is not None and found.info.lifecycle_stage == "active" else None

    def _last_step(self, run_id: str, name: str) -> int:
        return max((one.step for one in self._client.get_metric_history(run_id, name)), default=-1)

    def _metrics(self, line: Mapping[str, Any]) -> list[Any]:
        moment, step = self._milliseconds(line["seconds"]), line["step"]
        numbers = {
            f"{line['kind']}/{name}": float(value)
            for name, value in line.items()
            if name not in ("step", "seconds") and not isinstance(value, str)
        }
        return [
            self._metric(name, value, moment, step)
            for name, value in numbers.items()
            if step > self._last.get(name, -1)
        ]

    def _milliseconds(self, seconds: float) -> int:
        return round(1000 * (self._started + seconds))


def _parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while part := list(itertools.islice(rest, size)):
        yield part
