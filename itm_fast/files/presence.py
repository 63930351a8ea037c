"""Tell an absent optional file from one that cannot be read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["is_present"]


def is_present(path: str | os.PathLike[str]) -> bool:
    """Return whether an optional file exists. A file is absent only if nothing has its name.

    Raises:
        ValueError: something has the name, but it is not a readable file: a folder, a pipe, or a symbolic link that
            leads nowhere. The message names it.
    """
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_symlink():
            return False
        raise ValueError(f"{path}: a symbolic link to a missing file; repair or remove it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{path}: expected a file, found {found}")
    return True
