"""Writing files so that a reader never meets a half-written one.

Inside: `atomic_path`, `write_text`, `write_bytes`, `check_target`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it replaces `path` in one step, on an exception it is removed.

    The folder of `path` is created where it does not exist.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffix is kept at the end because numpy.save and others append one where they miss it.
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=f".tmp{target.suffix}", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp creates files readable by the owner alone; the finished file gets the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        # Without this a power cut may leave the new name with content that never reached the disk.
        _flush_to_disk(temporary)
        temporary.replace(target)
        if os.name == "posix":
            _flush_to_disk(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
