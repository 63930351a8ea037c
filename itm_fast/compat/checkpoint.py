"""Official checkpoints: files of `torch.save` that hold state dicts and the options of the command line.

Inside: `OfficialCheckpoint`, `StateDict`, `Weight`, `read_checkpoint`.

Both containers of torch are read, the zip file and the older stream of pickles that Python 2 wrote, too. Of Python
objects only tensors, plain containers and `argparse.Namespace` come through; whatever else a file names is refused
before it could run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from itm_fast.compat.options import Options
from itm_fast.files import regular
from itm_fast.files.messages import shown
from itm_fast.files.torch_files import load_plain

__all__ = ["OfficialCheckpoint", "StateDict", "Weight", "read_checkpoint"]


@attrs.frozen(eq=False)
class Weight:
    """A tensor of a checkpoint, and the key that messages name it by."""

    key: str
    tensor: Tensor


@attrs.frozen(eq=False)
class StateDict:
    """The weights of a module by their official names, and what messages call it: `model[0]`, or `model` if alone."""

    label: str
    weights: Mapping[str, Weight]

    def key(self, name: str) -> str:
        """What messages call a weight that may be missing."""
        return f"{self.label}[{name!r}]"


@attrs.frozen(eq=False)
class OfficialCheckpoint:
    """What an official checkpoint holds: one state dict per module, in the file's order, and the options."""

    path: Path
    parts: list[StateDict]
    options: Options
    epoch: int | None
    best_rsum: float | None

    def modules(self, *names: str) -> list[StateDict]:
        """The state dicts of the modules `names`; ValueError where the checkpoint has another number of them."""
        if len(self.parts) != len(names):
            wanted = "1 state dict" if len(names) == 1 else f"{len(names)} state dicts"
            raise ValueError(
                f"{self.path}: expected {wanted} in 'model' ({', '.join(names)}), got "
                f"{len(self.parts)}; is it the checkpoint of another model?"
            )
        return self.parts


def read_checkpoint(path: str | os.PathLike[str], *, ignored_options: Iterable[str] = ()) -> OfficialCheckpoint:
    """Reads a checkpoint without executing anything in it.

    Raises:
        ValueError: the file is missing, damaged, holds anything but tensors and plain values, or is no checkpoint of
            the official layout; one line names the file and the key.
    """
    path = Path(path)
    if not regular.is_file(path):
        found = "expected a checkpoint file, found a folder" if path.is_dir() else "no such checkpoint file"
        raise ValueError(f"{path}: {found}")
    try:
        content = load_plain(path, [argparse.Namespace])
    except ValueError as error:
        raise ValueError(f"{path}: not a readable checkpoint: {error}") from None
    for key in ("model", "opt"):
        if not isinstance(content, dict) or key not in content:
            raise ValueError(f"{path}: expected a dict with 'model' and 'opt', found no {key!r}")
    options = content["opt"]
    options = vars(options) if isinstance(options, argparse.Namespace) else options
    if not isinstance(options, Mapping):
        raise ValueError(f"{path}: opt: expected an argparse.Namespace, got {type(options).__name__}")
    model = content["model"]
    listed = isinstance(model, list | tuple)
    states = {f"model[{index}]": state for index, state in enumerate(model)} if listed else {"model": model}
    parts: list[StateDict] = []
    room = path.stat().st_size
    for label, state in states.items():
        parts.append(StateDict(label, _weights(path, label, state, room)))
        room -= sum(map(_room, parts[-1].weights.values()))
    return OfficialCheckpoint(
        path=path,
        parts=parts,
        options=Options(options, str(path), ignored_options),
        epoch=_number(content.get("epoch"), (int,)),
        best_rsum=_number(content.get("best_rsum"), (int, float)),
    )


def _weights(path: Path, part: str, state: Any, room: int) -> dict[str, Weight]:
    """The tensors of one state dict, `room` bytes at most, without the `module.` of DataParallel before names."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path}: {part}: expected a state dict, got {type(state).__name__}")
    weights: dict[str, Weight] = {}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path}: {part}: expected names as strings, got {shown(name)}")
        key = f"{part}[{shown(name)}]"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: {key}: expected a tensor, got {type(tensor).__name__}")
        # Strides of zero, a storage that the file lacks, or one for many weights: a few bytes for any number of values.
        weight = Weight(key, tensor.detach())
        room -= _room(weight)
        if room < 0:
            raise ValueError(f"{path}: {key}: claims {tensor.numel()} values, more than the file holds")
        plain = name.removeprefix("module.")
        if plain in weights:
            raise ValueError(f"{path}: {key}: stands there twice, with and without 'module.'")
        weights[plain] = weight
    return weights


def _room(weight: Weight) -> int:
    """Bytes that a weight takes in its file at least; its name is one."""
    return weight.tensor.numel() * weight.tensor.element_size() + 1


def _number(value: Any, kinds: tuple[type, ...]) -> Any:
    # Integers beyond those that a float can tell apart are no epochs, and too large ones cannot be written out.
    return value if type(value) in kinds and abs(value) < 2**53 else None
