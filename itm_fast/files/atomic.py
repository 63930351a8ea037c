"""Write files so that a reader never sees a half-written one."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from itm_fast.files.folder import Folder
from itm_fast.files.regular import check_regular, open_file

StrPath = str | os.PathLike[str]

# Error codes of a disk that accepts no more data: full, quota exceeded, file too large, I/O error.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# numpy checks the free space itself and raises exceptions without an error code.
_NUMPY_ERROR = re.compile(r"Not enough free space|\d+ requested and \d+ written")
# Bytes of two files that are compared at a time.
_PIECE = 2**20


def open_folder(path: StrPath, root: StrPath | None = None) -> Folder:
    """Open the folder `path` for writing; create it and its missing parents.

    Args:
        path: the folder; `root` or a folder below it.
        root: the folder that the user named; default: `path`. Links below it are refused; see `Folder`.
    """
    make_folder(Path(path if root is None else root))
    with naming_full_disk(path):
        return Folder(path, root, create=True)


@contextlib.contextmanager
def atomic_file(path: StrPath, root: StrPath | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file beside `path`. On success it replaces `path` in one step; on an exception it is removed.

    Missing parent folders are created. `root` is as in `open_folder`; default: the parent of `path`.

    Raises:
        OSError: the disk is full or broken. The message is one line that names `path`; its earlier content is kept.
        ValueError: `path`, or a folder between `root` and `path`, is a symbolic link.
    """
    target = Path(path)
    with open_folder(target.parent, root) as folder:
        folder.status(target.name)
        with naming_full_disk(target):
            temporary, handle = folder.temporary(*_temporary_name(target))
        try:
            with naming_full_disk(target):
                with os.fdopen(handle, "w+b") as file:
                    yield file
                    file.flush()
                    # Without this, a power cut may leave the new name with content that never reached the disk.
                    os.fsync(handle)
                _finish(folder, temporary, target.name)
        except BaseException:
            folder.remove(temporary)
            raise


def _finish(folder: Folder, temporary: str, target: str) -> None:
    folder.replace(temporary, target)
    folder.flush()


def open_in_place(path: StrPath, mode: str, root: StrPath | None = None) -> BinaryIO:
    """Open a file that is changed in place, without following a link. `root` is as in `atomic_file`.

    Args:
        path: the file; its folder exists.
        mode: "ab" appends and creates a missing file; "r+b" reads and writes.
        root: the folder that the user named.
    """
    flags = {"ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT, "r+b": os.O_RDWR}[mode]
    with Folder(Path(path).parent, root) as folder:
        return cast(BinaryIO, os.fdopen(folder.open(Path(path).name, flags), mode))


def check_entries(root: StrPath, names: Iterable[StrPath]) -> None:
    """Raise ValueError if one of the paths `names`, relative to `root`, is unsafe to write.

    It is unsafe if it is a named pipe, a socket or a device, or if it is or leads through a symbolic link.
    """
    for name in names:
        with contextlib.suppress(FileNotFoundError), Folder((Path(root) / name).parent, root) as folder:
            status = folder.status(Path(name).name)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                check_regular(status, Path(root) / name)


def _temporary_name(target: Path) -> tuple[str, str]:
    """Return the parts of a temporary name before and after its random characters."""
    return f".{target.stem}.", f".tmp{target.suffix}"


def temporary_pattern(path: StrPath) -> str:
    """Return the pattern of `fnmatch` for the names of temporary files of writers of `path`."""
    prefix, suffix = map(glob.escape, _temporary_name(Path(path)))
    return f"{prefix}{'?' * 8}{suffix}"


def remove_temporaries(path: StrPath, root: StrPath | None = None) -> None:
    """Remove temporary files of killed writers of `path`. Call it only while no other process writes `path`."""
    remove_matching(Path(path).with_name(temporary_pattern(path)), root)


def remove_matching(pattern: StrPath, root: StrPath | None = None, *, kept: str | None = None) -> None:
    """Remove the files in a folder whose names match the last part of `pattern`, except `kept`.

    `root` is as in `atomic_file`.
    """
    with contextlib.suppress(FileNotFoundError), Folder(Path(pattern).parent, root) as folder:
        for name in folder.names(Path(pattern).name):
            if name != kept:
                folder.remove(name)


@contextlib.contextmanager
def naming_full_disk(path: StrPath) -> Iterator[None]:
    """Convert the exception of a full or broken disk, even a wrapped one, into one line that names `path`."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_of_the_disk(cause):
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        kept = "; its earlier content is kept" if Path(path).exists() else ""
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
    with Folder(folder.parent) as parent:
        parent.flush()


def write_text(path: StrPath, text: str, root: StrPath | None = None) -> None:
    """Write `text` atomically as UTF-8, with its line ends unchanged.

    Bytes of paths that are not UTF-8 are surrogates in Python's texts; they are written as in `\\udcff`.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), root)


def write_bytes(path: StrPath, content: bytes, root: StrPath | None = None) -> None:
    """Write `content` atomically. `root` is as in `atomic_file`."""
    with atomic_file(path, root) as file:
        file.write(content)


def write_together(folder: StrPath, contents: Mapping[str, bytes], marker: str, removed: Collection[str] = ()) -> None:
    """Replace files of `folder` that belong together. A process that ends meanwhile leaves no mixture of both.

    All contents are on disk before the first name changes. `marker`, without which the files are not read, is then
    removed first and comes back last, unless only one file changes.

    Args:
        folder: the folder. It is created if it is missing.
        contents: the files by name, `marker` included. Other files stay.
        marker: the name of the file that readers need.
        removed: names of files that do not belong to the new ones; they are removed, if present.

    Raises:
        OSError: the disk is full or broken. The message is one line that names the file. All earlier files are kept.
        ValueError: one of the files is a symbolic link.
    """
    with open_folder(folder) as opened, contextlib.ExitStack() as cleanup:
        temporaries: dict[str, str] = {}
        for name, content in contents.items():
            target = Path(folder) / name
            opened.status(name)
            with naming_full_disk(target):
                temporaries[name], handle = opened.temporary(*_temporary_name(target))
                # Nothing is left to remove once the file is renamed.
                cleanup.callback(opened.remove, temporaries[name])
                with os.fdopen(handle, "w+b") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(handle)
        changed = [name for name, content in contents.items() if not _contains(Path(folder) / name, content)]
        gone = [name for name in removed if opened.status(name) is not None]
        if len(changed) + len(gone) > 1:
            opened.remove(marker)
            opened.flush()
        for name in gone:
            opened.remove(name)
        for name in sorted(contents, key=lambda one: one == marker):
            opened.replace(temporaries[name], name)
        opened.flush()


def _contains(path: Path, content: bytes) -> bool:
    """Return whether `path` is a file with this content."""
    with contextlib.suppress(OSError), open_file(path) as file:
        starts = range(0, len(content), _PIECE)
        return os.fstat(file.fileno()).st_size == len(content) and all(
            file.read(_PIECE) == content[start : start + _PIECE] for start in starts
        )
    return False


def check_target(path: StrPath) -> None:
    """Raise ValueError if `path` cannot become a file. Call it before long work that writes its result there."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path}: expected a file to write, found a folder")
    if target.parent.is_dir():
        check_entries(target.parent, [target.name])
    check_folder(target.parent, path)


def check_folder(folder: StrPath, path: StrPath) -> None:
    """Raise ValueError if no file can be created in `folder`, which may be missing. The message names `path`."""
    absolute = Path(folder).absolute()
    nearest = next(one for one in (absolute, *absolute.parents) if one.exists())
    if not nearest.is_dir():
        raise ValueError(f"{path}: expected a folder at {nearest}, found a file")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{path}: the folder {nearest} is not writable")
