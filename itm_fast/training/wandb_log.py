"""The numbers of a run's log as a run of Weights & Biases.

Inside: `WandbLog`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from itm_fast.files import atomic
from itm_fast.training.tracker_run import Ending, keep_id, kept_id

__all__ = ["WandbLog"]

# 255 is the code of wandb itself after Ctrl-C.
_EXIT_CODE: dict[Ending, int] = {"finished": 0, "stopped": 255, "failed": 1}


class WandbLog:
    """Write a run of wandb into `RUN/wandb`; `online` sends it, too, as the environment variables of wandb say.

    A resumed run has the id of its first start. Offline, each start writes a folder with all lines of the log. Online,
    it adds the lines after the last step that the server has, because wandb takes no value of an earlier step back.

    Args:
        run: the run directory.
        settings: settings of the run, for the table of runs.
        online: send the log to the server of wandb.

    Raises:
        ValueError: the optional package wandb is not installed.
    """

    folder = "wandb"

    def __init__(self, run: str | os.PathLike[str], settings: Mapping[str, Any], *, online: bool) -> None:
        if not online:
            # Otherwise wandb would report its own errors to its authors.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "tracker: the package wandb is not installed; install it with pip install 'itm_fast[wandb]', or train "
                "without --tracker"
            ) from None
        self._wandb: Any = wandb
        self._run, self._settings, self._online = Path(run), dict(settings), online
        self._log: Any = None
        self._first_step = 0

    def start(self, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Start a run of wandb with `lines`, the content of the log so far, or continue the one that had them."""
        folder = self._run / self.folder
        # wandb opens its files by itself; this refuses a link in place of the folder.
        atomic.open_folder(folder, self._run).close()
        mode = {} if self._online else {"mode": "offline"}
        self._log = self._wandb.init(
            project="itm_fast",
            id=kept_id(folder) if lines else None,
            resume="allow" if self._online else None,
            name=self._run.resolve().name,
            dir=str(self._run),
            config=self._settings,
            settings=self._wandb.Settings(
                **mode, console="off", silent=True, disable_code=True, disable_git=True,
                x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        keep_id(folder, self._log.id, self._run)
        self._first_step = self._log.step
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of the log, and the seconds of training until then."""
        if line["step"] < self._first_step:
            return
        numbers = {name: value for name, value in line.items() if name != "step" and not isinstance(value, str)}
        self._log.log({f"{line['kind']}/{name}": value for name, value in numbers.items()}, step=line["step"])

    def close(self, ending: Ending) -> None:
        """Write what is buffered and finish the run of wandb."""
        if self._log is not None:
            self._log.finish(exit_code=_EXIT_CODE[ending])
