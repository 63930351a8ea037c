"""Read official checkpoints: files of `torch.save` with state dicts and command-line options.

Inside: `OfficialCheckpoint`, `StateDict`, `Weight`, `read_checkpoint`, `read_state_dict`, `load_file`.

Both formats of torch are supported: zip files, and the older pickle streams, also those written by Python 2. Only
tensors, plain containers, `argparse.Namespace` and `easydict.EasyDict` are loaded. Any other Python object is refused
before it can run.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from itm_fast.compat.options import Options
from itm_fast.files import regular
from itm_fast.files.messages import shown
from itm_fast.files.torch_files import Allowed, load_plain

__all__ = ["OfficialCheckpoint", "StateDict", "Weight", "load_file", "read_checkpoint", "read_state_dict"]


# What options may consist of. The class of the package easydict, which need not be installed, is a dict.
_OPTIONS = (argparse.Namespace, (OrderedDict, "easydict.EasyDict"))


@attrs.frozen(eq=False)
class Weight:
    """A tensor of a checkpoint, and its key in messages."""

    key: str
    tensor: Tensor


@attrs.frozen(eq=False)
class StateDict:
    """The weights of a module by their official names.

    Attributes:
        label: name of the state dict in messages: `model[0]`, or `model` if there is only one.
        weights: the weights by name.
    """

    label: str
    weights: Mapping[str, Weight]

    def key(self, name: str) -> str:
        """Return the key of a weight in messages, for one that may be missing."""
        return f"{self.label}[{name!r}]"


@attrs.frozen(eq=False)
class OfficialCheckpoint:
    """The content of an official checkpoint.

    Attributes:
        path: the file.
        parts: one state dict per module, in the order of the file.
        options: the options of the training script.
        epoch: epoch of the weights, if known.
        best_rsum: best sum of recalls on the validation split, if known.
    """

    path: Path
    parts: list[StateDict]
    options: Options
    epoch: int | None
    best_rsum: float | None

    def modules(self, *names: str) -> list[StateDict]:
        """Return the state dicts of the modules `names`; ValueError if the checkpoint has more or fewer."""
        if len(self.parts) != len(names):
            wanted = "1 state dict" if len(names) == 1 else f"{len(names)} state dicts"
            raise ValueError(
                f"{self.path}: expected {wanted} in 'model' ({', '.join(names)}), got "
                f"{len(self.parts)}; is it the checkpoint of another model?"
            )
        return self.parts


def read_checkpoint(path: str | os.PathLike[str], *, ignored_options: Iterable[str] = ()) -> OfficialCheckpoint:
    """Read a checkpoint without executing any code in it.

    Args:
        path: the file.
        ignored_options: unknown options that cause no warning.

    Raises:
        ValueError: the file is missing or damaged, contains anything except tensors and plain values, or does not have
            the official layout. The message names the file and the key.
    """
    path = Path(path)
    content = load_file(path, _OPTIONS)
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


def read_state_dict(path: str | os.PathLike[str], *, ignored_options: Iterable[str] = ()) -> OfficialCheckpoint:
    """Read a file that contains the weights of a whole model and nothing else, such as `pytorch_model.bin`.

    Args:
        path: the file.
        ignored_options: unused, as there are no options.

    Raises:
        ValueError: as `read_checkpoint`.
    """
    path = Path(path)
    weights = _weights(path, "state_dict", load_file(path), path.stat().st_size)
    options = Options({}, str(path), ignored_options)
    return OfficialCheckpoint(path, [StateDict("state_dict", weights)], options, epoch=None, best_rsum=None)


def load_file(path: Path, allowed: Sequence[Allowed] = ()) -> Any:
    """Load as `load_plain` does; ValueError naming the file if it is missing or refused."""
    if not regular.is_file(path):
        found = "expected a checkpoint file, found a folder" if path.is_dir() else "no such checkpoint file"
        raise ValueError(f"{path}: {found}")
    try:
        return load_plain(path, allowed)
    except ValueError as error:
        raise ValueError(f"{path}: not a readable checkpoint: {error}") from None


def _weights(path: Path, part: str, state: Any, room: int) -> dict[str, Weight]:
    """Return the tensors of a state dict, at most `room` bytes, and strip the prefix `module.` of DataParallel."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path}: {part}: expected a state dict, got {type(state).__name__}")
    weights: dict[str, Weight] = {}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path}: {part}: expected names as strings, got {shown(name)}")
        key = f"{part}[{shown(name)}]"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: {key}: expected a tensor, got {type(tensor).__name__}")
        # Zero strides, a missing storage or a shared one can claim any number of values with few bytes in the file.
        weight = Weight(key, tensor.detach())
        room -= _room(weight)
        if room < 0:
            raise ValueError(f"{path}: {key}: claims {tensor.numel()} values, more than the file holds")
        plain = name.removeprefix("module.")
        if plain in weights:
            raise ValueError(f"{path}: {key}: appears twice, with and without 'module.'")
        weights[plain] = weight
    return weights


def _room(weight: Weight) -> int:
    """Return the minimum number of bytes of a weight in its file, with at least one for its name."""
    return weight.tensor.numel() * weight.tensor.element_size() + 1


def _number(value: Any, kinds: tuple[type, ...]) -> Any:
    # Larger integers are not epochs: they exceed the exact range of a float, and printing them may fail.
    return value if type(value) in kinds and abs(value) < 2**53 else None
