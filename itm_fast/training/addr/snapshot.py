"""The file of the discriminators: safetensors, written atomically, read a few rows at a time.

Inside: `write_snapshot`, `read_snapshot`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from itm_fast.files import atomic, regular
from itm_fast.files.documents import parse_json
from itm_fast.files.messages import shortened, shown
from itm_fast.models.weights_file import check_finite, read_shapes

__all__ = ["read_snapshot", "write_snapshot"]

_VERSION = 1
# A single entry, because the library writes several entries in arbitrary order.
_METADATA = "discriminators"
# Number of rows read at once: a few megabytes at usual widths.
_ROWS = 4096
# Counts, scales and squares.
_NEVER_NEGATIVE = ("steps", "_scale", "_sq")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.int8: "I8"}


def write_snapshot(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, int | str],
    root: str | os.PathLike[str] | None = None,
) -> None:
    """Replace `path` by a safetensors file of `tensors` with `metadata` in its header, without copying the tensors.

    `root` is as in `atomic.atomic_file`.

    Raises:
        OSError: the disk is full. The one-line message names the file, whose previous content is kept.
    """
    header: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps({"format_version": _VERSION, **metadata})}}
    # The library's order: larger items first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # The library needs either a path to write to or memory for a copy.
    with atomic.atomic_file(path, root) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_snapshot(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, int | str]) -> None:
    """Fill `tensors` from a file whose metadata equals `expected`.

    Raises:
        ValueError: the file is missing or damaged, or its metadata, names, shapes or dtypes differ. The one-line
            message names the file. Tensors change only if the damage is found while the values are read.
    """
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file; the discriminators of the run are missing")
    shapes = read_shapes(path)
    try:
        with (
            regular.open_file(path) as opened,
            safetensors.safe_open(regular.native_path(opened.fileno(), path), framework="pt") as file,
        ):
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
        found = parse_json(text)
    except ValueError:
        found = None
    version = found.get("format_version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or version != _VERSION:
        raise ValueError(f"{path}: no discriminators of format version {_VERSION}")
    for name, wanted in expected.items():
        if found.get(name) != wanted:
            raise ValueError(
                f"{path}: discriminators of another training: {name} {shown(found.get(name))}, expected {shown(wanted)}"
            )
