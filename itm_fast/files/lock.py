"""Allow one writer at a time in a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from itm_fast.files import atomic
from itm_fast.files.folder import Folder

if sys.platform != "win32":
    import fcntl

__all__ = ["hold"]

# Fixed length in bytes of the line that names the holder, so that a new line overwrites an earlier one.
_LENGTH = 100

_held: set[int] = set()


@contextlib.contextmanager
def hold(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    refusal: Callable[[str], str],
    warning: Callable[[str], str],
    temporary: bool = False,
) -> Iterator[None]:
    """Hold the lock file `path`. A missing folder is created.

    The operating system owns the lock (flock) and releases it when the process ends for any reason. Without flock
    (Windows, some network file systems) other writers are not kept out.

    Args:
        path: the lock file, no symbolic link. It remains after use unless it is `temporary`, and always after a kill.
        root: the folder that the user named, as in `atomic.open_folder`; default: the folder of `path`.
        refusal: makes the error message from a description of the process that holds the lock.
        warning: makes the warning for a file system without locks, from its error message.
        temporary: remove the file at the end.

    Raises:
        ValueError: another process holds the lock.
    """
    path = Path(path)
    with atomic.open_folder(path.parent, root) as folder:
        handle = _opened(folder, path.name, refusal, warning)
        try:
            with atomic.naming_full_disk(path):
                os.write(handle, f"{os.getpid()} on {socket.gethostname()}".encode().ljust(_LENGTH))
            yield
        finally:
            # A forked process has closed its copy already; the same number may belong to another file there.
            if handle in _held:
                if temporary:
                    folder.remove(path.name)
                _held.discard(handle)
                os.close(handle)


def _opened(folder: Folder, name: str, refusal: Callable[[str], str], warning: Callable[[str], str]) -> int:
    """Open and lock the file; return its handle."""
    while True:
        handle = folder.open(name, os.O_RDWR | os.O_CREAT)
        _held.add(handle)
        try:
            _acquire(handle, refusal, warning)
            # A holder that ended meanwhile may have removed the file opened here. Another process could then lock a
            # new file of the same name, so try again.
            status = folder.status(name)
            if status is not None and os.path.samestat(os.fstat(handle), status):
                return handle
        except BaseException:
            _let_go(handle)
            raise
        _let_go(handle)


def _let_go(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _acquire(handle: int, refusal: Callable[[str], str], warning: Callable[[str], str]) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = " ".join(os.read(handle, _LENGTH).decode(errors="replace").split())
        raise ValueError(refusal(f"process {holder or 'of unknown number'}")) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        warnings.warn(warning(error.strerror or str(error)), stacklevel=7)


def _close_in_forked_process() -> None:
    """Close the handles, so that a worker process that outlives a killed holder does not keep its lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_forked_process)
