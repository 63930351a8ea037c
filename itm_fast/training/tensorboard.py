"""The numbers of a run's log as curves for TensorBoard.

Inside: `TensorBoardLog`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from itm_fast.files import atomic

__all__ = ["TensorBoardLog"]

# Where a line belongs, not what was measured; `kind` stands before the names of its curves.
_POSITION = ("kind", "step", "epoch", "seconds")


class TensorBoardLog:
    """Event files in `folder`: a curve for each number in the lines of `metrics.jsonl`, such as `train/loss`.

    Raises:
        ValueError: the package tensorboard, which is optional, is not installed.
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
        """Writes the curves of a run anew from `lines`, what its log holds so far; `seconds` it has taken so far.

        Event files can only grow, and those of a run that was killed hold steps that its log has lost and lack others.
        A new file therefore says everything again and tells TensorBoard to forget what the earlier ones said.
        """
        with atomic.naming_full_disk(self.folder):
            self._opened = atomic.open_folder(self.folder, self.folder.parent)
            self._writer = self._make_writer(self._opened.native_path(), purge_step=0)
        # Times of earlier parts are moved up, as if the run had never paused.
        self._started = time.time() - seconds
        for line in lines:
            self.write(line)
        self._writer.flush()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds the numbers of one line of the log."""
        numbers = {name: value for name, value in line.items() if name not in _POSITION and not isinstance(value, str)}
        with atomic.naming_full_disk(self.folder):
            for name, value in numbers.items():
                self._writer.add_scalar(
                    f"{line['kind']}/{name}", value, line["step"], walltime=self._started + line["seconds"]
                )

    def close(self) -> None:
        """Writes what is still in memory."""
        if self._writer is not None:
            with atomic.naming_full_disk(self.folder):
                self._writer.close()
            self._opened.close()
