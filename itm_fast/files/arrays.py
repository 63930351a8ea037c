"""Open arrays of numbers from untrusted files: .npy, .npz, safetensors and torch.save. No Python object is unpickled.

Inside: `Array`, `SUFFIXES`, `map_npy`, `open_array`.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import safetensors
import torch
from torch import Tensor

from itm_fast.files import regular
from itm_fast.files.messages import shortened, shown
from itm_fast.files.torch_files import load_plain

__all__ = ["SUFFIXES", "Array", "map_npy", "open_array"]

Array = np.ndarray | Tensor

SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")

# The errors that numpy raises for damaged or malicious headers.
_UNREADABLE = (
    ValueError, EOFError, SyntaxError, TypeError, KeyError, OverflowError, RecursionError, MemoryError,
    tokenize.TokenError, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError,
)  # fmt: skip
_MAX_HEADER_BYTES = 10_000  # numpy has the same limit, but reads the header before it checks the length.
# Scores compress by less than this. A file that unpacks to more was made to fill the memory.
_MAX_COMPRESSION = 100
_OBJECTS = (
    "holds Python objects, which are not loaded because they can run code; save the numbers alone, such as "
    "numpy.save(FILE, saved['sims']) for the dictionaries that SCAN's code saves"
)

# How a .npz file begins, which numpy opens under any name.
_ZIP = b"PK\x03\x04"


def map_npy(path: str | os.PathLike[str]) -> np.memmap:
    """Map the array of a `.npy` file. Only the header is read, and compared with the size of the file.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is damaged, truncated, or holds Python objects; one line names it.
    """
    status = Path(path).stat()
    regular.check_regular(status, path)
    size = status.st_size
    try:
        with regular.open_file(path) as file:
            if not file.read(8).startswith((np.lib.format.MAGIC_PREFIX, _ZIP)):
                # numpy's own message would advise to unpickle the file.
                raise ValueError("it does not begin as one" if size else "empty file")
            file.seek(0)
            header = _header(file)
            promised = None if header is None or header[2].hasobject else file.tell() + _bytes(header)
        truncated = promised is not None and size < promised
        mapped = None if truncated else np.load(path, mmap_mode="r", allow_pickle=False)
    except _UNREADABLE as error:
        # The first line of numpy's message names the kind of damage.
        reason = (str(error).splitlines() or ["empty file"])[0]
        raise ValueError(f"{path}: not a readable .npy array of numbers ({reason}; {size} bytes on disk)") from None
    if mapped is None:
        raise ValueError(f"{path}: truncated: the header promises {promised} bytes, the file has {size}")
    if not isinstance(mapped, np.memmap):
        raise ValueError(f"{path}: expected one .npy array, got {type(mapped).__name__}")
    return mapped


def open_array(path: Path, key: str | None = None) -> Array:
    """Open one array of real numbers of any shape.

    Arrays stay on disk, except those in compressed `.npz` files and in the old format of torch.save.

    Args:
        path: the file; its suffix, one of `SUFFIXES`, gives the format.
        key: name of the array in a file of several; None: the only one with two dimensions.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is damaged, does not hold the array, or holds no real numbers; one line names it.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    regular.check_regular(path.stat(), path)
    if suffix == ".npy":
        if key is not None:
            raise ValueError(f"{path}: a .npy file holds one array without a name, so leave out the name {shown(key)}")
        with regular.open_file(path) as file:
            if _holds_objects(file):
                raise ValueError(f"{path}: {_OBJECTS}")
        array: Array = map_npy(path)
    elif suffix == ".npz":
        array = _open_npz(path, key)
    elif suffix == ".safetensors":
        array = _open_safetensors(path, key)
    else:
        array = _open_torch(path, key)
    if isinstance(array, Tensor):
        real = not (array.dtype.is_complex or array.dtype == torch.bool)
    else:
        real = array.dtype.kind in ("f", "i", "u")
    if not real or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: expected real numbers of at most 64 bits, found {array.dtype}")
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]] | None:
    """Read the header of a `.npy` file: shape, whether columns are contiguous, dtype. None: it is no such file."""
    readers = {(1, 0): (2, np.lib.format.read_array_header_1_0), (2, 0): (4, np.lib.format.read_array_header_2_0)}
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        return None
    version = tuple(file.read(2))
    if version not in readers:
        return None
    width, read_header = readers[version]
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length} bytes, more than {_MAX_HEADER_BYTES}")
    file.seek(-width, os.SEEK_CUR)
    return read_header(file)


def _bytes(header: tuple[tuple[int, ...], bool, np.dtype[Any]]) -> int:
    return math.prod(header[0]) * header[2].itemsize


def _holds_objects(file: IO[bytes]) -> bool:
    try:
        header = _header(file)
    except _UNREADABLE:
        return False
    return header is not None and header[2].hasobject


def _open_npz(path: Path, key: str | None) -> Array:
    """Map the array of an uncompressed member in its place; read a compressed one."""
    try:
        with regular.open_file(path) as file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            headers = {}
            for name, entry in entries.items():
                with archive.open(entry) as member:
                    try:
                        found = _header(member)
                    except _UNREADABLE as error:
                        reason = shortened(str(error)) or "damaged"
                        raise ValueError(f"{path}: {name}: not a readable array ({reason})") from None
                    if found is not None:
                        headers[name] = (found, member.tell())
            name = _chosen(path, key, {name: header[0] for name, (header, _) in headers.items()})
            (shape, by_columns, dtype), start = headers[name]
            if dtype.hasobject:
                raise ValueError(f"{path}: {name} {_OBJECTS}")
            if 0 in shape:
                raise ValueError(f"{path}: {name} is empty, with shape {list(shape)}")
            entry, needed = entries[name], start + math.prod(shape) * dtype.itemsize
            if needed > entry.file_size or needed > _MAX_COMPRESSION * path.stat().st_size:
                raise ValueError(f"{path}: {name} claims {needed:,} bytes, far more than the file holds")
            order: Literal["F", "C"] = "F" if by_columns else "C"
            if entry.compress_type == zipfile.ZIP_STORED:
                # The data of a member follow its local header, whose two variable parts end it.
                file.seek(entry.header_offset + 26)
                offset = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + start
                if offset - start + needed > path.stat().st_size:
                    raise ValueError(f"{path}: truncated: {name} ends behind the end of the file")
                return np.memmap(path, dtype, "r", offset, shape, order)
            with archive.open(entry) as member:
                member.read(start)
                content = member.read(needed - start)
            if len(content) < needed - start:
                raise ValueError(f"{path}: truncated: {name} ends early")
            return np.frombuffer(content, dtype).reshape(shape, order=order)
    except (
        zipfile.BadZipFile, zlib.error, EOFError, OverflowError, struct.error, NotImplementedError, RuntimeError,
    ) as error:  # fmt: skip
        raise ValueError(f"{path}: not a readable .npz archive ({shortened(str(error)) or 'damaged'})") from None


def _open_safetensors(path: Path, key: str | None) -> Array:
    try:
        with (
            regular.open_file(path) as opened,
            safetensors.safe_open(regular.native_path(opened.fileno(), path), framework="pt") as file,
        ):
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            tensor: Tensor = file.get_tensor(_chosen(path, key, shapes))
            return tensor
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({shortened(str(error))})") from None


def _open_torch(path: Path, key: str | None) -> Array:
    try:
        content = load_plain(path, mapped=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; expected a tensor, or a dictionary of tensors, from torch.save") from None
    if isinstance(content, Tensor) and key is None:
        content = {"": content}
        key = ""
    if not isinstance(content, Mapping):
        found = "a tensor without a name" if isinstance(content, Tensor) else type(content).__name__
        raise ValueError(f"{path}: expected a tensor, or a dictionary of tensors, found {found}")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    tensor = tensors[_chosen(path, key, {name: tuple(value.shape) for name, value in tensors.items()})]
    return tensor.detach()


def _chosen(path: Path, key: str | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of the array to read: `key`, or the only one with two dimensions."""
    listed = shortened(", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none", 400)
    if key is not None:
        if key not in shapes:
            raise ValueError(f"{path}: has no array {shown(key)}; its arrays: {listed}")
        return key
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(matrices) != 1:
        advice = "; --key NAME chooses one" if matrices else ""
        raise ValueError(
            f"{path}: expected one array with two dimensions, found {len(matrices)}; its arrays: {listed}{advice}"
        )
    return matrices[0]
