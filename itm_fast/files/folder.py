"""Write below a folder without following symbolic links, which could lead to any other file."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType

from itm_fast.files.regular import check_regular, native_path

__all__ = ["Folder"]

# Windows cannot open folders. There, links are only looked for before a path is used.
_HANDLES = os.open in os.supports_dir_fd
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FILE = _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Folder:
    """An open folder. Each operation is relative to its handle and refuses symbolic links.

    Args:
        path: the folder; `root` or a folder below it.
        root: the folder that the user named; default: `path`. It must exist, and the way to it may lead through links.
            Links from there to `path` are refused.
        create: create missing folders below `root`.

    Raises:
        OSError: a folder does not exist or cannot be opened.
        ValueError: there is a link or a file in place of a folder below `root`; the message names it.
    """

    def __init__(
        self, path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, *, create: bool = False
    ) -> None:
        self.path = Path(path if root is None else root)
        self._handle = os.open(self.path, _FOLDER) if _HANDLES else None
        try:
            for name in Path(path).relative_to(self.path).parts:
                self._enter(name, create)
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str, create: bool) -> None:
        if create and self.status(name) is None:
            # Another process may be faster.
            with contextlib.suppress(FileExistsError), self._naming(name):
                os.mkdir(self._place(name), dir_fd=self._handle)
            self.flush()
        status = self.status(name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{self.path / name}: expected a folder, found a file")
        if self._handle is not None:
            with self._naming(name):
                inner = os.open(name, _FOLDER | _NO_LINK, dir_fd=self._handle)
            os.close(self._handle)
            self._handle = inner
        self.path /= name

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Replace the relative path in an exception by the whole path."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None

    def _place(self, name: str) -> str:
        return str(self.path / name) if self._handle is None else name

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry; None if it does not exist.

        Raises:
            ValueError: it is a symbolic link.
        """
        try:
            status = os.stat(self._place(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(status.st_mode):
            raise ValueError(
                f"{self.path / name}: is a symbolic link, which is not followed for writing; put the file or folder "
                "itself there"
            )
        return status

    def open(self, name: str, flags: int) -> int:
        """Open a regular file with `flags` of `os.open`; return its handle.

        Raises:
            ValueError: the entry is a link, a folder, or another kind of file that is not regular.
        """
        status = self.status(name)
        if status is not None:
            check_regular(status, self.path / name)
        with self._naming(name):
            handle = os.open(self._place(name), flags | _FILE, 0o666, dir_fd=self._handle)
        try:
            check_regular(os.fstat(handle), self.path / name)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def temporary(self, prefix: str, suffix: str) -> tuple[str, int]:
        """Create a file with eight random characters in its name; return the name and a handle to read and write."""
        name = f"{prefix}{secrets.token_hex(4)}{suffix}"
        return name, self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def native_path(self) -> str:
        """Return a path to the open folder, for libraries that create files themselves. It is valid until `close`."""
        return native_path(self._handle, self.path)

    def names(self, pattern: str) -> list[str]:
        """Return the names of the entries that match a pattern of `fnmatch`."""
        with os.scandir(self.path if self._handle is None else self._handle) as entries:
            return sorted(entry.name for entry in entries if fnmatchcase(entry.name, pattern))

    def replace(self, name: str, target: str) -> None:
        """Rename an entry to `target`, in place of an earlier file of that name."""
        with self._naming(target):
            os.replace(self._place(name), self._place(target), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with contextlib.suppress(FileNotFoundError), self._naming(name):
            os.unlink(self._place(name), dir_fd=self._handle)

    def flush(self) -> None:
        """Write the names of the entries to the disk, so that they survive a power cut."""
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the handle."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.close()
