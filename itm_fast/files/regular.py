"""Open files from untrusted sources. Only regular files are opened: a named pipe or a device can block forever."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

__all__ = ["check_regular", "is_file", "is_present", "native_path", "open_file", "read_bytes"]

# O_NONBLOCK: return at once if the file is a named pipe without a writer.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raise ValueError if `status`, the status of `path`, is not that of a regular file."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ValueError(f"{os.fspath(path)}: expected a regular file, found {_KINDS.get(kind, 'something else')}")


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a regular file; False if it is missing or a folder.

    Raises:
        ValueError: it is a named pipe, a socket or a device.
    """
    path = Path(path)
    if path.is_file():
        return True
    if path.exists() and not path.is_dir():
        check_regular(path.stat(), path)
    return False


def is_present(path: str | os.PathLike[str]) -> bool:
    """Return whether an optional file exists. A file is absent only if nothing has its name.

    Raises:
        ValueError: something has the name, but is not a regular file that can be read: a folder, a named pipe, or a
            symbolic link that leads nowhere. The message names it.
    """
    try:
        status = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_symlink():
            return False
        raise ValueError(f"{os.fspath(path)}: a symbolic link to a missing file; repair or remove it") from None
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    check_regular(status, path)
    return True


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: the file is missing, a folder, or cannot be read.
        ValueError: it is a named pipe, a socket or a device.
    """
    return cast(BinaryIO, open(path, "rb", opener=_opened))


def _opened(path: str, flags: int) -> int:
    is_file(path)
    handle = os.open(path, flags | _FLAGS)
    try:
        status = os.fstat(handle)
        # `open` itself raises IsADirectoryError for a folder.
        if not stat.S_ISDIR(status.st_mode):
            check_regular(status, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; raises as `open_file`."""
    with open_file(path) as file:
        return file.read()


def native_path(handle: int | None, path: str | os.PathLike[str]) -> str:
    """Return a path to an open file or folder, for libraries that open paths themselves and need a path in UTF-8.

    Without /proc (macOS, Windows), it is `path` itself.
    """
    link = f"/proc/self/fd/{handle}"
    return link if Path(link).exists() else os.fspath(path)
