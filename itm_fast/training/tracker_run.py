"""A tracker's run: how it ended, and its id, kept beside its files so that a resumed run continues it.

Inside: `Ending`, `RUN_ID`, `kept_id`, `keep_id`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from itm_fast.files import atomic, regular
from itm_fast.files.documents import read_text

__all__ = ["RUN_ID", "Ending", "keep_id", "kept_id"]

# finished: all steps are done; stopped: by a signal; failed: by an error.
Ending = Literal["finished", "stopped", "failed"]
RUN_ID = "run_id"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_BYTES = 100


def kept_id(folder: Path) -> str | None:
    """Return the id in the folder of a tracker; None if there is none, or none that a tracker gave."""
    path = folder / RUN_ID
    if not regular.is_file(path):
        return None
    try:
        text = read_text(path, _MAX_BYTES).strip()
    except ValueError:
        return None
    return text if _ID.fullmatch(text) else None


def keep_id(folder: Path, found: str, run: Path) -> None:
    """Write the id into the folder of a tracker in the directory `run`."""
    atomic.write_text(folder / RUN_ID, f"{found}\n", run)
