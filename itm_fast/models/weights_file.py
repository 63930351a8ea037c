"""Read and write weights as safetensors. A header is checked before memory of the size that it claims is allocated.

Inside: `read_shapes`, `read_weights`, `weights_bytes`, `check_finite`, `missing`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save
from torch import Tensor

from itm_fast.files import regular
from itm_fast.files.documents import parse_json
from itm_fast.files.messages import shortened
from itm_fast.files.run_files import CHECKPOINT, CONFIG

__all__ = ["check_finite", "missing", "read_shapes", "read_weights", "weights_bytes"]

# A model has some dozens of tensors of about a hundred bytes of header each.
_MAX_HEADER_BYTES = 2**20


def weights_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return the content of a safetensors file with these tensors, on any device and of any strides."""
    weights: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in state.items():
        weight = tensor.detach().cpu().contiguous()
        place = weight.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as tied weights.
        weights[name] = weight.clone() if place in stored else weight
        stored.add(place)
    # Bytes, not save_file, whose exceptions do not say in a readable way that a disk is full.
    return save(weights)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor from the header.

    Raises:
        ValueError: the file is missing, its header is damaged or too large, or the file is shorter than the header
            says; one line names the file.
    """
    if not regular.is_file(path):
        raise missing(path)
    size = path.stat().st_size
    with regular.open_file(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise _damaged(path, f"{size} bytes")
        if length > _MAX_HEADER_BYTES:
            raise _damaged(path, f"its header claims {length:,} bytes, more than {_MAX_HEADER_BYTES:,}")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: truncated: the header has {length:,} bytes, the file {size:,}")
    try:
        tensors = {name: entry for name, entry in parse_json(text).items() if name != "__metadata__"}
        shapes = {name: _shape(entry) for name, entry in tensors.items()}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise _damaged(path, "its header is damaged") from None
    if 8 + length + end > size:
        raise ValueError(f"{path}: truncated: the header promises {8 + length + end:,} bytes, the file has {size:,}")
    return shapes


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file that `read_shapes` accepted; raise ValueError naming the file if it is damaged."""
    try:
        with regular.open_file(path) as file:
            return load_file(regular.native_path(file.fileno(), path))
    except safetensors.SafetensorError as error:
        raise _damaged(path, shortened(str(error))) from None


def missing(path: Path) -> ValueError:
    """Return the error of a file of a saved model that does not exist; for a run, it says how to get the model."""
    run = path.parent
    if not regular.is_file(run / CONFIG):
        return ValueError(f"{path}: no such file; {run} is not a saved model")
    out = f"--out {shlex.quote(str(run))}"
    # Without a checkpoint there is nothing to resume, and `train` starts the run in the same folder.
    again = (
        f"continue it as it was started, with --resume: itm-fast train {out} --resume"
        if regular.is_file(run / CHECKPOINT)
        else f"start it again with: itm-fast train --config {shlex.quote(str(run / CONFIG))} {out}"
    )
    return ValueError(f"{path}: no such file; {run} is a run that has no validated model yet; {again}")


def check_finite(tensor: Tensor, name: str, own: Tensor | None = None) -> None:
    """Raise ValueError naming the first row (first dimension) of a tensor with a value that is not finite.

    Values that equal those of `own` at the same places are accepted, such as the -inf of a mask.
    """
    finite = tensor.isfinite()
    if own is not None and not bool(finite.all()):
        own = own.to(tensor.device)
        finite |= (tensor == own) | (tensor.isnan() & own.isnan())
    if not bool(finite.all()):
        row = f"row {int(finite.logical_not().nonzero()[0, 0])} holds" if tensor.ndim else "holds"
        raise ValueError(f"{name}: {row} values that are not finite")


def _shape(entry: Any) -> tuple[int, ...]:
    sizes = tuple(entry["shape"])
    if any(type(size) is not int or size < 0 for size in (*sizes, *entry["data_offsets"])):
        raise ValueError
    return sizes


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: not a readable safetensors file ({reason})")
