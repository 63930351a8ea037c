"""The numbers of a run's log as TensorBoard curves.

Inside: `TensorBoardLog`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from itm_fast.files import atomic
from itm_fast.training.tracker_run import Ending

__all__ = ["TensorBoardLog"]

# These locate a line and are not measurements; `kind` is the prefix of the curves' names.
_POSITION = ("kind", "step", "epoch", "seconds")


class TensorBoardLog:
    """Write event files to `folder`: a curve, such as `train/loss`, for each number in the lines of `metrics.jsonl`.

    Raises:
        ValueError: the optional package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboard: the package tensorboard is not installed; install it with "
                "pip install 'itm_fast[tensorboard]', or train without --tensorboard"
            ) from None
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self._started = 0.0
        self.folder = Path(folder)

    def start(self, lines: Iterable[Mapping[str, Any]], seconds: float) -> None:
        """Write the curves of a run from `lines`, the content of its log so far; `seconds` is its training time so far.

        Event files can only grow. Those of a killed run may contain steps that its log has lost, and lack others. A new
        file therefore contains all lines and tells TensorBoard to discard those of earlier files.
        """
        with atomic.naming_full_disk(self.folder):
            self._opened = atomic.open_folder(self.folder, self.folder.parent)
            self._writer = self._make_writer(self._opened.native_path(), purge_step=0)
        # Shift the times of earlier parts as if the run had not paused.
        self._started = time.time() - seconds
        for line in lines:
            self.write(line)
        self._writer.flush()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of the log."""
        numbers = {name: value for name, value in line.items() if name not in _POSITION and not isinstance(value, str)}
        with atomic.naming_full_disk(self.folder):
            for name, value in numbers.items():
                self._writer.add_scalar(
                    f"{line['kind']}/{name}", value, line["step"], walltime=self._started + line["seconds"]
                )

    def close(self, _ending: Ending) -> None:
        """Flush buffered events and close the file."""
        if self._writer is not None:
            with atomic.naming_full_disk(self.folder):
                self._writer.close()
            self._opened.close()
