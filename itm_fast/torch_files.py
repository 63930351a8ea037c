"""Reading files of `torch.save` that anybody may have written.

Inside: `load_plain`.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from itm_fast.messages import shortened
from itm_fast.pickles import has_endless_tuple

__all__ = ["load_plain"]


def load_plain(path: Path, allowed: Sequence[Callable[..., Any]] = ()) -> Any:
    """The content of a file, on the CPU: tensors, plain values, and objects of the classes `allowed`.

    Raises:
        ValueError: the file is damaged, would unpack to more than it holds, or names anything else, of which nothing
            was run then. The message is the reason alone, to stand behind the path.
    """
    _check_container(path)
    try:
        endless = any(_endless(path))
    except Exception:
        raise ValueError("damaged, or not written by torch.save") from None
    if endless:
        raise ValueError("holds a tuple of tuples that is out of all proportion to the file")
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(allowed)):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damage can raise nearly anything, and torch's text advises to switch off the protection against code.
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
    if foreign:
        raise ValueError(
            f"holds the Python object {shortened(foreign[1])}, which does not belong there; nothing of it was run"
        )
    raise ValueError("damaged, or not written by torch.save")


def _endless(path: Path) -> Iterator[bool]:
    """Whether a pickle of the file has a tuple whose hash would never be done, one by one."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            yield from (has_endless_tuple(archive.read(name)) for name in names)
        return
    with path.open("rb") as file:
        # Before zip files: a magic number, the version, sizes of types, the content, names of storages; then these.
        yield from (has_endless_tuple(file) for _ in range(5))


def _check_container(path: Path) -> None:
    """Refuses an archive that would unpack to more than it holds: torch stores tensors uncompressed."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise ValueError("a damaged zip file") from None
    size = path.stat().st_size
    if unpacked > size:
        raise ValueError(f"its {size:,} bytes claim to hold {unpacked:,}")
