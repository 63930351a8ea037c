"""Writing files so that a reader never meets a half-written one.

Inside: `atomic_path`, `write_text`, `write_bytes`, `make_folder`, `remove_temporaries`,
`naming_full_disk`, `check_target`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

# What a disk answers when it takes no more: full, over the user's quota, over the largest size of a file, broken.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# numpy looks for room itself, and its exceptions have no number.
_NUMPY_ERROR = re.compile(r"Not enough free space|\d+ requested and \d+ written")


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it replaces `path` in one step, on an exception it is removed.

    The folder of `path` is created where it does not exist.

    Raises:
        OSError: the disk is full or broken; one line that names `path`, whose earlier content is kept.
    """
    target = Path(path)
    make_folder(target.parent)
    with naming_full_disk(target):
        # The suffix is kept at the end because numpy.save and others append one where they miss it.
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
    # mkstemp creates files readable by the owner alone; the finished file gets the usual permissions.
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)
    # Without this a power cut may leave the new name with content that never reached the disk.
    _flush_to_disk(temporary)
    temporary.replace(target)
    if os.name == "posix":
        _flush_to_disk(target.parent)


def _temporary_name(target: Path) -> tuple[str, str]:
    """What stands before and after the random part of a temporary name."""
    return f".{target.stem}.", f".tmp{target.suffix}"


def remove_temporaries(path: str | os.PathLike[str]) -> None:
    """Removes what writers of `path` that were killed left behind; only while nobody else writes `path`."""
    target = Path(path)
    prefix, suffix = _temporary_name(target)
    # tempfile draws eight characters.
    for temporary in target.parent.glob(f"{glob.escape(prefix)}{'?' * 8}{glob.escape(suffix)}"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_full_disk(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the exception of a full or broken disk, however a writer wrapped it, into one line that names `path`."""
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
    """Creates `folder` and those above it where missing; a power cut later does not take them away again."""
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
    """Writes `text` as UTF-8 with line ends as they are, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises ValueError where `path` cannot become a file: a look before long work whose result goes there."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path}: expected a file to write, found a folder")
    nearest = next(parent for parent in target.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{path}: expected a folder at {nearest}, found a file")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{path}: the folder {nearest} is not writable")
