"""Read files of `torch.save` from untrusted sources. Pickles are inspected without unpickling them."""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import torch

from itm_fast.files.messages import shortened
from itm_fast.files.regular import native_path, open_file

__all__ = ["READABLE", "Allowed", "RefusedError", "check_pickle", "load_plain"]

# A class that a file may name, or a class and the name that stands for it in the file.
Allowed = Callable[..., Any] | tuple[Callable[..., Any], str]

# Largest weight of a tuple. Tuples in an honest file hold sizes, strides and the like.
_MAX_WEIGHT = 10**4
_GETS = ("BINGET", "LONG_BINGET")
_PUTS = ("BINPUT", "LONG_BINPUT")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS")
_CALLS = ("REDUCE", "NEWOBJ", "BUILD")


# The types that tensors consist of. torch itself would allow more, such as bytearray and codecs.
_KINDS = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip
READABLE = frozenset(_KINDS.values())
_STORAGES = [f"{module}.{kind}Storage" for module in ("torch", "torch.cuda") for kind in _KINDS]
_ALLOWED = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    *(f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
    *_STORAGES,
}


def load_plain(path: Path, allowed: Sequence[Allowed] = (), *, checksums: bool = False, mapped: bool = False) -> Any:
    """Load the content of a file to the CPU: dense tensors, plain values, and objects of the classes `allowed`.

    A tensor may claim more memory than the file has bytes; no memory is allocated before this is checked. `checksums`
    verifies the checksums of an archive, which torch writes by default but does not check for tensors. `mapped` leaves
    the tensors of an archive on disk.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is damaged, would unpack to more bytes than it has, or names any other object. No code
            from the file was run. The message is only the reason; prepend the path.
    """
    names = _ALLOWED.union(
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in allowed
    )
    with open_file(path) as file:
        return _load(Path(native_path(file.fileno(), path)), names, allowed, checksums, mapped)


def _load(path: Path, names: set[str], allowed: Sequence[Allowed], checksums: bool, mapped: bool) -> Any:
    try:
        if _is_archive(path):
            mapped &= _check_archive(path, names, checksums)
        else:
            mapped = False
            _check_stream(path, names)
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(allowed)):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except RefusedError:
        raise
    except Exception:
        # Damage can raise nearly any exception, and torch's message suggests turning off `weights_only`.
        raise ValueError("damaged, or not written by torch.save") from None


def _is_archive(path: Path) -> bool:
    """Return whether torch reads the file as an archive. (Python's zipfile would check the end of the file instead.)"""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_archive(path: Path, names: set[str], checksums: bool) -> bool:
    """Refuse an archive that would unpack to more bytes than it has: torch stores tensors uncompressed.

    Returns:
        Whether all its records are uncompressed.
    """
    size = path.stat().st_size
    _check_end(path, size)
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        if unpacked > size:
            raise RefusedError(f"claims to hold {unpacked:,} bytes, but has only {size:,}")
        changed = archive.testzip() if checksums else None
    if changed is not None:
        raise RefusedError("damaged: its content does not match its checksum")
    # Use the reader of torch.load: for names that differ only in case, other readers may choose another record.
    reader = torch._C.PyTorchFileReader(str(path))
    keys = {record.removeprefix("data/") for record in reader.get_all_records() if record.startswith("data/")}
    check_pickle(reader.get_record("data.pkl"), names, keys)
    return plain


def _check_end(path: Path, size: int) -> None:
    """Raise ValueError if torch and Python could find different directories in the archive."""
    with path.open("rb") as file:
        file.seek(max(size - 98, 0))
        end = file.read()
    # The last record of an archive. Large archives and those of torch have a 64-bit record and its locator before it.
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
        # The format before zip archives: magic number, version, type sizes, content, storage names; then the storages.
        for _ in range(5):
            check_pickle(file, names)


class RefusedError(ValueError):
    """A pickle that is readable but unsafe. The message says why."""


@attrs.define(eq=False)
class _Value:
    """What is known about a value: how many values its hash visits, how many items it has, and the parts of a tuple."""

    weight: int = 1
    items: int = 0
    parts: list[_Value] | None = None
    text: str | None = None


def check_pickle(pickle: bytes | IO[bytes], allowed: Container[str], keys: Container[str] | None = None) -> None:
    """Read one pickle and refuse harmful content that `torch.load` accepts.

    Harmful are: functions that allocate much from little (`bytearray(10**12)`); containers that are copied again and
    again; a storage that is read several times under different keys; and deeply shared tuples of tuples, whose hash
    takes exponential time when they are dictionary keys.

    Args:
        pickle: the bytes, or a file positioned at their start. Afterwards the file is positioned behind the pickle.
        allowed: names of the allowed classes and functions, such as `collections.OrderedDict`.
        keys: keys of the existing storages; None accepts any key.

    Raises:
        RefusedError: the pickle names another object, or holds harmful content.
        ValueError, LookupError, TypeError, OverflowError: this is not a pickle of torch.
    """
    # None stands for a mark on the stack.
    stack: list[_Value | None] = []
    memo: dict[int, _Value | None] = {}
    operations = copies = 0
    argument: Any
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        operations += 1
        if name in _PUTS:
            memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name in _FILLS:
            taken = _take(stack, operation.stack_before[1:])
            (target,) = _take(stack, operation.stack_before[:1])
            target.items += len(taken)
            stack.append(target)
        elif name in _CALLS:
            target, arguments = _take(stack, operation.stack_before)
            if name != "BUILD" and arguments.parts is None:
                raise ValueError
            size = arguments.items + sum(part.items for part in arguments.parts or ())
            copies += size
            stack.append(target if name == "BUILD" else _Value(items=size))
        elif name == "BINPERSID":
            (identity,) = _take(stack, operation.stack_before)
            if identity.parts is None or (keys is not None and identity.parts[2].text not in keys):
                raise ValueError
            stack.append(_Value())
        else:
            if name == "GLOBAL" and (found := argument.replace(" ", ".")) not in allowed:
                raise RefusedError(f"names the Python object {shortened(found)}, which is not allowed; no code was run")
            taken = _take(stack, operation.stack_before)
            if name.startswith("TUPLE") or name == "EMPTY_TUPLE":
                value = _Value(1 + sum(part.weight for part in taken), len(taken), taken)
            else:
                value = _Value(text=argument if isinstance(argument, str) else None)
            if value.weight > _MAX_WEIGHT:
                raise RefusedError("holds nested tuples that are far larger than the file")
            stack += [None if one is pickletools.markobject else value for one in operation.stack_after]
    # An honest pickle fills a container value by value and uses it once.
    if copies > operations:
        raise RefusedError("copies far more values than it holds")


def _take(stack: list[_Value | None], kinds: list[pickletools.StackObject]) -> list[_Value]:
    """Pop the operands of an operation, lowest first: single values, and all values above the last mark."""
    taken: list[_Value] = []
    if pickletools.markobject in kinds:
        while (top := stack.pop()) is not None:
            taken.append(top)
        kinds = kinds[: kinds.index(pickletools.markobject)]
    for _ in kinds:
        top = stack.pop()
        if top is None:
            raise IndexError
        taken.append(top)
    return taken[::-1]
