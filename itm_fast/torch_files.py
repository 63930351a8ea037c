"""Reading files of `torch.save` that anybody may have written.

Inside: `load_plain`.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from itm_fast.pickles import RefusedError, check_pickle

__all__ = ["load_plain"]

# What tensors are made of; torch itself would let through much more, such as bytearray and codecs.
_STORAGES = [f"{module}.{kind}Storage" for module in ("torch", "torch.cuda") for kind in (
    "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"
)]  # fmt: skip
_ALLOWED = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    *(f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
    *_STORAGES,
}


def load_plain(path: Path, allowed: Sequence[Callable[..., Any]] = (), *, checksums: bool = False) -> Any:
    """The content of a file, on the CPU: dense tensors, plain values, and objects of the classes `allowed`.

    A tensor may claim more memory than the file has bytes, none of which is taken before it is read. With `checksums`
    an archive is compared with its own, which torch writes unless it is told not to, and does not look at for tensors.

    Raises:
        ValueError: the file is damaged, would unpack to more than it holds, or names anything else, of which nothing
            was run then. The message is the reason alone, to stand behind the path.
    """
    names = _ALLOWED.union(f"{one.__module__}.{one.__qualname__}" for one in allowed)
    try:
        if _is_archive(path):
            _check_archive(path, names, checksums)
        else:
            _check_stream(path, names)
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(allowed)):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except RefusedError:
        raise
    except Exception:
        # Damage can raise nearly anything, and torch's text advises to switch off the protection against code.
        raise ValueError("damaged, or not written by torch.save") from None


def _is_archive(path: Path) -> bool:
    """Whether torch takes the file for an archive. Python's zipfile looks at its end, where anything may stand."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_archive(path: Path, names: set[str], checksums: bool) -> None:
    """Refuses an archive that would unpack to more than it holds: torch stores tensors uncompressed."""
    size = path.stat().st_size
    _check_end(path, size)
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > size:
            raise RefusedError(f"its {size:,} bytes claim to hold {unpacked:,}")
        changed = archive.testzip() if checksums else None
    if changed is not None:
        raise RefusedError("damaged: what it holds does not agree with its checksum")
    # The reader that torch.load uses: of names that are equal but for capitals, others may take another one.
    reader = torch._C.PyTorchFileReader(str(path))
    keys = {record.removeprefix("data/") for record in reader.get_all_records() if record.startswith("data/")}
    check_pickle(reader.get_record("data.pkl"), names, keys)


def _check_end(path: Path, size: int) -> None:
    """Raises ValueError where torch and Python could find different directories: it has to end right before the end."""
    with path.open("rb") as file:
        file.seek(max(size - 98, 0))
        end = file.read()
    # The last record of an archive; before it, in large ones and in those of torch, one of 64 bits and its locator.
    signature, length, offset, comment = struct.unpack("<4s8x2LH", end[-22:])
    stop = size - 22
    if end[-42:-38] == b"PK\x06\x07":
        stop = size - 98
        large, length, offset = struct.unpack_from("<4s36x2Q", end)
        if large != b"PK\x06\x06" or int.from_bytes(end[-34:-26], "little") != stop:
            raise ValueError
    if signature != b"PK\x05\x06" or comment or offset + length != stop:
        raise ValueError


def _check_stream(path: Path, names: set[str]) -> None:
    with path.open("rb") as file:
        # Before zip files: a magic number, the version, sizes of types, the content, names of storages; then these.
        for _ in range(5):
            check_pickle(file, names)
