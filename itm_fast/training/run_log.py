"""The log of a run: `metrics.jsonl`, and the same lines for trackers.

Inside: `RunLog`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from itm_fast.training import run_folder
from itm_fast.training.metrics_log import MetricsLog, read_metrics
from itm_fast.training.state_check import check_summary
from itm_fast.training.tracker_run import Ending
from itm_fast.training.trackers import Tracker

__all__ = ["RunLog"]

# Where a line belongs; the other keys of a validation are its summary.
_PLACE = ("kind", "split", "step", "epoch", "seconds")


class RunLog:
    """The log in the directory `run`, which `trackers` get, too. Only one of several processes `writes`.

    Trackers learn that the training failed, unless another `ending` was set.
    """

    def __init__(self, run: str | Path, *, trackers: Sequence[Tracker] = (), writes: bool) -> None:
        self.lines, self._writes = MetricsLog(Path(run) / run_folder.METRICS), writes
        self.trackers = list(trackers) if writes else []
        self.ending: Ending

    @contextlib.contextmanager
    def open(self, size: int, seconds: float) -> Iterator[None]:
        """Open the log for a block, after its first `size` bytes; `seconds` is the earlier time of the run."""
        if self._writes:
            self.lines.truncate(size)
        lines = _numbers(self.lines) if self.trackers and self.lines.size else []
        self.ending = "failed"
        with contextlib.ExitStack() as opened:
            for tracker in self.trackers:
                tracker.start(lines, seconds)
                opened.callback(self._close, tracker)
            yield

    def _close(self, tracker: Tracker) -> None:
        tracker.close(self.ending)

    def write(self, **line: Any) -> None:
        if not self._writes:
            return
        self.lines.write(**line)
        for tracker in self.trackers if line["kind"] != "warning" else ():
            tracker.write(line)

    def validation_at(self, position: int, step: int) -> tuple[dict[str, float], int] | None:
        """Return the validation after `step` at byte `position` of the log, and the end of its line.

        Raises:
            ValueError: the line is not a summary.
        """
        found = self.lines.line_at(position)
        if found is None:
            return None
        line, end = found
        if line.get("kind") != "validation" or line.get("step") != step:
            return None
        summary = {key: value for key, value in line.items() if key not in _PLACE}
        check_summary(summary, f"{self.lines.path}: the validation after step {step}")
        return summary, end


def _numbers(lines: MetricsLog) -> list[dict[str, Any]]:
    found = read_metrics(lines.path, ("kind", "step", "seconds"))
    return [line for line in found if line["kind"] != "warning"]
