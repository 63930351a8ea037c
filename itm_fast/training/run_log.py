"""The log of a run: `metrics.jsonl`, and curves for TensorBoard.

Inside: `RunLog`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from itm_fast.training import run_folder
from itm_fast.training.metrics_log import MetricsLog, read_metrics
from itm_fast.training.state_check import check_summary
from itm_fast.training.tensorboard import TensorBoardLog

__all__ = ["RunLog"]

# Where a line belongs; the other keys of a validation are its summary.
_PLACE = ("kind", "split", "step", "epoch", "seconds")


class RunLog:
    """The log in the directory `run`, with curves if `tensorboard`. Only one of several processes `writes`.

    Raises:
        ValueError: the package tensorboard, which is optional, is not installed.
    """

    def __init__(self, run: str | Path, *, tensorboard: bool, writes: bool) -> None:
        self.lines, self._writes = MetricsLog(Path(run) / run_folder.METRICS), writes
        self.curves = TensorBoardLog(Path(run) / run_folder.TENSORBOARD) if tensorboard and writes else None

    @contextlib.contextmanager
    def open(self, size: int, seconds: float) -> Iterator[None]:
        """Open the log for a block, after its first `size` bytes; `seconds` is the earlier time of the run."""
        if self._writes:
            self.lines.truncate(size)
        if self.curves is None:
            yield
            return
        self.curves.start(_curve_lines(self.lines) if self.lines.size else [], seconds)
        try:
            yield
        finally:
            self.curves.close()

    def write(self, **line: Any) -> None:
        if not self._writes:
            return
        self.lines.write(**line)
        if self.curves is not None and line["kind"] != "warning":
            self.curves.write(line)

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


def _curve_lines(lines: MetricsLog) -> list[dict[str, Any]]:
    found = read_metrics(lines.path, ("kind", "step", "seconds"))
    return [line for line in found if line["kind"] != "warning"]
