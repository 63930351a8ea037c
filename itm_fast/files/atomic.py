"""Write files so that a reader never sees a half-written one."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Error codes of a disk that accepts no more data: full, quota exceeded, file too large, I/O error.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# numpy checks the free space itself and raises exceptions without an error code.
_NUMPY_ERROR = re.compile(r"Not enough free space|\d+ requested and \d+ written")


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it replaces `path` in one step; on an exception it is removed.

    Missing parent folders are created.

    Raises:
        OSError: the disk is full or broken. The message is one line that names `path`; its earlier content is kept.
    """
    target = Path(path)
    make_folder(target.parent)
    with naming_full_disk(target):
        # The suffix stays at the end because numpy.save and others append a missing one.
        prefix, suffix = _temporary_name(target)
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with naming_full_disk(target):
            yield temporary
            _finish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _finish(temporary: Path, target: Path) -> None:
    # mkstemp creates files that only the owner can read; the finished file gets the usual permissions.
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)
    # Without this, a power cut may leave the new name with content that never reached the disk.
    _flush_to_disk(temporary)
    temporary.replace(target)
    if os.name == "posix":
        _flush_to_disk(target.parent)


def _temporary_name(target: Path) -> tuple[str, str]:
    """Return the parts of a temporary name before and after its random characters."""
    return f".{target.stem}.", f".tmp{target.suffix}"


def remove_temporaries(path: str | os.PathLike[str]) -> None:
    """Remove temporary files of killed writers of `path`. Call it only while no other process writes `path`."""
    target = Path(path)
    prefix, suffix = _temporary_name(target)
    # tempfile uses eight random characters.
    for temporary in target.parent.glob(f"{glob.escape(prefix)}{'?' * 8}{glob.escape(suffix)}"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_full_disk(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the exception of a full or broken disk, even a wrapped one, into one line that names `path`."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_of_the_disk(cause):
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        kept = "; what was there before is kept" if Path(path).exists() else ""
        raise OSError(f"{path}: cannot be written: {cause.strerror or cause}{kept}") from error


def _is_of_the_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and (error.errno in _DISK_ERRORS or bool(_NUMPY_ERROR.match(str(error))))


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, and flush them to disk so that they survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with naming_full_disk(folder):
        folder.mkdir(exist_ok=True)
    if os.name == "posix":
        _flush_to_disk(folder.parent)


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` atomically as UTF-8, with its line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if `path` cannot become a file. Call it before long work that writes its result there."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path}: expected a file to write, found a folder")
    nearest = next(parent for parent in target.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{path}: expected a folder at {nearest}, found a file")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{path}: the folder {nearest} is not writable")
