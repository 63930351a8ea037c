"""One writer at a time in a folder.

Inside: `hold`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from itm_fast import files

if sys.platform != "win32":
    import fcntl

__all__ = ["hold"]

# Bytes of the line that names the holder, always as many, so that it covers an earlier one.
_LENGTH = 100

_held: set[int] = set()


@contextlib.contextmanager
def hold(
    path: str | os.PathLike[str],
    *,
    refusal: Callable[[str], str],
    warning: Callable[[str], str],
    temporary: bool = False,
) -> Iterator[None]:
    """Holds the lock whose file is `path`, whose folder is created where it does not exist.

    The system holds the lock (flock) and lets it go when the process ends, however it ends. Without flock (Windows,
    some network file systems) nothing is kept out.

    Args:
        path: the file, which stays unless it is `temporary`; a process that is killed leaves it, too.
        refusal: the message where another process holds the lock, from that process.
        warning: the warning where the file system knows no locks, from what it says.
        temporary: remove the file at the end.

    Raises:
        ValueError: another process holds the lock.
    """
    path = Path(path)
    files.make_folder(path.parent)
    handle = _opened(path, refusal, warning)
    try:
        with files.naming_full_disk(path):
            os.write(handle, f"{os.getpid()} on {socket.gethostname()}".encode().ljust(_LENGTH))
        yield
    finally:
        # A forked process that leaves this block has closed its copy already; the number may be another file's there.
        if handle in _held:
            if temporary:
                path.unlink(missing_ok=True)
            _held.discard(handle)
            os.close(handle)


def _opened(path: Path, refusal: Callable[[str], str], warning: Callable[[str], str]) -> int:
    """The handle of the file, locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(handle)
        try:
            _acquire(handle, refusal, warning)
            # A holder that came to its end meanwhile may have removed the file that was opened here: another process
            # could then lock a new one of its name.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
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
    """A worker process that outlives a killed holder must not hold its lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_forked_process)
