"""The file of the discriminators: safetensors, written in one step, read some rows at a time.

Inside: `write_snapshot`, `read_snapshot`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from itm_fast.files import atomic
from itm_fast.files.messages import shortened, shown
from itm_fast.models.weights_file import check_finite, read_shapes

__all__ = ["read_snapshot", "write_snapshot"]

_VERSION = 1
# One entry: the library writes several in any order, and equal discriminators would not make equal files.
_METADATA = "discriminators"
# Rows that are read at once: some megabytes of any width in use.
_ROWS = 4096
# Counts, sizes and squares.
_NEVER_NEGATIVE = ("steps", "_scale", "_sq")
# What the library says of an error of the system.
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_snapshot(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, int | str]) -> None:
    """Replaces `path` by a file of `tensors`, which are not copied, with `metadata` in its header.

    Raises:
        OSError: the disk is full; one line that names the file, whose earlier content is kept.
    """
    with atomic.atomic_path(path) as temporary:
        try:
            save_file(dict(tensors), temporary, {_METADATA: json.dumps({"format_version": _VERSION, **metadata})})
        except safetensors.SafetensorError as error:
            found = _SYSTEM_ERROR.search(str(error))
            if found is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def read_snapshot(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, int | str]) -> None:
    """Fills `tensors` from a file whose metadata is what is `expected`.

    Raises:
        ValueError: the file is missing or damaged, or its metadata, names, shapes or dtypes are others; one line names
            it. Nothing is filled unless the numbers themselves turn out to be damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the discriminators of the run are missing")
    shapes = read_shapes(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            _check_metadata(path, (file.metadata() or {}).get(_METADATA, ""), expected)
            for name, tensor in tensors.items():
                if shapes.get(name) != tuple(tensor.shape):
                    raise ValueError(f"{path}: {name}: expected shape {tuple(tensor.shape)}, got {shapes.get(name)}")
            for name, tensor in tensors.items():
                part = file.get_slice(name)
                for start in range(0, tensor.shape[0], _ROWS):
                    rows = part[start : start + _ROWS]
                    if rows.dtype != tensor.dtype:
                        raise ValueError(f"{path}: {name}: expected {tensor.dtype}, got {rows.dtype}")
                    check_finite(rows, f"{path}: {name}, from row {start}")
                    if name.endswith(_NEVER_NEGATIVE) and bool((rows < 0).any()):
                        raise ValueError(f"{path}: {name}, from row {start}: expected no negative values")
                    tensor[start : start + _ROWS] = rows
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({shortened(str(error))})") from None


def _check_metadata(path: Path, text: str, expected: Mapping[str, int | str]) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    version = found.get("format_version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or version != _VERSION:
        raise ValueError(f"{path}: no discriminators of format version {_VERSION}")
    for name, wanted in expected.items():
        if found.get(name) != wanted:
            raise ValueError(
                f"{path}: discriminators of another training: {name} {shown(found.get(name))}, expected {shown(wanted)}"
            )
