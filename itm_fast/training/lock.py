"""One training at a time in a RUN folder.

Inside: `lock`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from itm_fast import files

if sys.platform != "win32":
    import fcntl

__all__ = ["LOCK_FILE", "lock"]

LOCK_FILE = Path("last") / "lock"

# Bytes of the line that names the holder, always as many, so that it covers an earlier one.
_LENGTH = 100

_held: set[int] = set()


@contextlib.contextmanager
def lock(run: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other trainings out of `run`, whose folder is created where it does not exist; readers need no lock.

    The system holds the lock (flock) and lets it go when the process ends, however it ends; the file itself stays,
    since removing it would let two processes hold locks on two files of one name. Without flock (Windows, some network
    file systems) nothing is kept out.

    Raises:
        ValueError: another training holds the lock; its process is named.
    """
    path = Path(run) / LOCK_FILE
    files.make_folder(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(handle)
    try:
        _acquire(handle, run)
        with files.naming_full_disk(path):
            os.write(handle, f"{os.getpid()} on {socket.gethostname()}".encode().ljust(_LENGTH))
        yield
    finally:
        # A forked process that leaves this block has closed its copy already; the number may be another file's there.
        if handle in _held:
            _held.discard(handle)
            os.close(handle)


def _acquire(handle: int, run: str | os.PathLike[str]) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = " ".join(os.read(handle, _LENGTH).decode(errors="replace").split())
        raise ValueError(
            f"{run}: process {holder or 'of unknown number'} is training there; wait for its end, or choose another "
            "--out"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        warnings.warn(
            f"{run}: its file system knows no locks ({error.strerror}); start no second training there", stacklevel=4
        )


def _close_in_forked_process() -> None:
    """A worker process that outlives a killed training must not hold its lock."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_forked_process)
