"""`Fragments`: the variable-length sets that every operator of the package takes.

An image is a set of region vectors; a caption is a set of word vectors. `Fragments` concatenates the vectors of many
sets without padding and stores the offset at which each set starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree

from itm_fast.files import atomic
from itm_fast.files.messages import shown
from itm_fast.files.regular import read_bytes

__all__ = ["Fragments", "check_has_values", "has_values"]

_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# A dataclass, as DistributedDataParallel looks for tensors in the fields of these, but not in other objects.
@dataclass(init=False, repr=False, eq=False, match_args=False)
class Fragments:
    """Concatenated vectors of `n_sets` sets: the regions of images or the words of captions.

    Args:
        values: `(N, d)` floating point, the vectors of all sets in order.
        offsets: `(n_sets + 1,)` int32 or int64 on the device of `values`; set `i` is
            `values[offsets[i]:offsets[i + 1]]`. Offsets start at 0, never decrease and end at `N`.
        check: check the values of `offsets` if they are on the CPU. Shapes, dtypes and devices are always checked.
        max_length: length of the longest set, if the caller knows it; otherwise computed on first use. Operators on
            CUDA use it to allocate memory. If it is too small, the regulators return NaN for longer sets there.

    Raises:
        TypeError: `values` is not a floating point tensor or `offsets` is not an int32 or int64 tensor.
        ValueError: a shape, a device or an offset is wrong.
    """

    __slots__ = ("_has_rest", "_max_length", "offsets", "values")

    values: Tensor
    offsets: Tensor

    def __init__(self, values: Tensor, offsets: Tensor, *, check: bool = True, max_length: int | None = None) -> None:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"values: expected a floating point tensor, got {_describe(values)}")
        if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offsets: expected an int32 or int64 tensor, got {_describe(offsets)}")
        if values.dim() != 2:
            raise ValueError(f"values: expected shape (N, d), got {tuple(values.shape)}")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"offsets: expected shape (n_sets + 1,), got {tuple(offsets.shape)}")
        if values.device != offsets.device:
            raise ValueError(f"offsets: expected them on {values.device} beside the values, got {offsets.device}")
        if check and offsets.device.type == "cpu" and has_values(offsets):
            _check_offsets(offsets, values.shape[0])
        self.values = values
        self.offsets = offsets
        self._max_length = max_length
        self._has_rest = False

    def check_offsets(self) -> None:
        """Raise ValueError if offsets decrease or do not span the values, or a set is longer than `max_length`.

        Synchronizes with a GPU.
        """
        _check_offsets(self.offsets, self.values.shape[0], may_have_rest=self._has_rest)
        if self._max_length is None or len(self) == 0:
            return
        longest = int(self.lengths.max())
        if longest > self._max_length:
            raise ValueError(
                f"max_length: expected at least {longest}, the length of the longest set, got {self._max_length}"
            )

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor | None = None, *, mask: Tensor | None = None) -> Fragments:
        """Pack padded sets.

        Works under `torch.compile(fullgraph=True)`. There, and with fake or meta tensors, padding rows are moved behind
        the last set instead of removed, because the number of rows must not depend on values. `trimmed` removes them
        outside of the graph; `set_index` and `to_padded` do not work inside it.

        Args:
            padded: `(n_sets, max_len, d)` floating point.
            lengths: integer `(n_sets,)`, number of rows of each set, counted from the left. None: all rows, or the
                rows that `mask` selects.
            mask: bool or integer `(n_sets, max_len)`, non-zero for the rows that belong to a set, as tokenizers return
                it. Padding may be anywhere, also on the left. Pass either `lengths` or `mask`.

        Returns:
            `Fragments` of `n_sets` sets.

        Raises:
            TypeError: `lengths` is not an integer tensor, or `mask` is not a bool or integer tensor.
            ValueError: a shape or a length is wrong, or both `lengths` and `mask` are given.
        """
        if not isinstance(padded, Tensor) or padded.dim() != 3:
            raise ValueError(f"padded: expected a tensor of shape (n_sets, max_len, d), got {_describe(padded)}")
        n_sets, max_len, dim = padded.shape
        if mask is not None:
            if lengths is not None:
                raise ValueError("mask: expected lengths or mask, got both")
            valid = _valid_rows(mask, n_sets, max_len).to(padded.device)
            lengths = valid.sum(1)
        elif lengths is None:
            offsets = torch.arange(n_sets + 1, device=padded.device) * max_len
            return cls(padded.reshape(n_sets * max_len, dim), offsets, check=False, max_length=max_len)
        else:
            lengths = _checked_lengths(lengths, padded)
            valid = torch.arange(max_len, device=padded.device) < lengths[:, None]
        if has_values(valid):
            return cls(padded[valid], _offsets_of(lengths), check=False)
        return cls._with_rest(padded.flatten(0, 1), valid.flatten(), _offsets_of(lengths))

    @classmethod
    def _with_rest(cls, values: Tensor, valid: Tensor, offsets: Tensor, max_length: int | None = None) -> Fragments:
        """Move rows that are not `valid` behind the last set."""
        packed = cls(values[(~valid).to(torch.uint8).argsort(stable=True)], offsets, check=False, max_length=max_length)
        packed._has_rest = True
        return packed

    def trimmed(self) -> Fragments:
        """Return the sets without rows behind the last one, which `from_padded` leaves under `torch.compile`.

        Not for use in a compiled function. Synchronizes with a GPU if there may be such rows.
        """
        if not self.may_have_rest:
            return self
        check_has_values("offsets", self.offsets)
        values = self.values[: int(self.offsets[-1])]
        return Fragments(values, self.offsets, check=False, max_length=self._max_length)

    @property
    def may_have_rest(self) -> bool:
        """Whether rows may follow the last set, as after `from_padded` under `torch.compile`."""
        return self._has_rest

    @classmethod
    def from_list(cls, tensors: Iterable[Tensor]) -> Fragments:
        """Pack a non-empty list of `(n_i, d)` tensors, one per set."""
        tensors = list(tensors)
        if not tensors:
            raise ValueError("tensors: expected at least one tensor (an empty list has no width d)")
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or tensor.dim() != 2:
                raise ValueError(f"tensors[{index}]: expected a tensor of shape (n, d), got {_describe(tensor)}")
            _check_like_first("tensors", index, tensor, tensors[0])
        lengths = torch.tensor([len(tensor) for tensor in tensors], device=tensors[0].device)
        return cls(torch.cat(tensors), _offsets_of(lengths), check=False)

    @classmethod
    def cat(cls, fragments: Iterable[Fragments]) -> Fragments:
        """Concatenate the sets of all `fragments`, which must have the same width, dtype and device."""
        fragments = list(fragments)
        if not fragments:
            raise ValueError("fragments: expected at least one Fragments")
        for index, part in enumerate(fragments):
            if not isinstance(part, Fragments):
                raise TypeError(f"fragments[{index}]: expected Fragments, got {_describe(part)}")
            _check_like_first("fragments", index, part.values, fragments[0].values)
        offsets = _offsets_of(torch.cat([part.lengths for part in fragments]))
        are_known = all(part.knows_max_length for part in fragments)
        longest = max(part.max_length for part in fragments) if are_known else None
        if not torch.compiler.is_compiling():
            fragments = [part.trimmed() for part in fragments]
        values = torch.cat([part.values for part in fragments])
        if any(part._has_rest for part in fragments):
            rows = [torch.arange(part.values.shape[0], device=values.device) for part in fragments]
            valid = torch.cat([own < part.offsets[-1] for own, part in zip(rows, fragments, strict=True)])
            return cls._with_rest(values, valid, offsets, longest)
        return cls(values, offsets, check=False, max_length=longest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write values and offsets to a safetensors file, atomically. Dtypes are kept."""
        # Imported here, so that operators run in an environment with torch alone.
        import safetensors.torch

        tensors = {"offsets": self.offsets, "values": self.trimmed().values}
        content = safetensors.torch.save({name: one.detach().cpu().contiguous() for name, one in tensors.items()})
        atomic.write_bytes(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Fragments:
        """Read a file that `save` wrote. The tensors are on the CPU.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged or contains no `Fragments`; the message names the file.
        """
        import safetensors.torch

        try:
            tensors = safetensors.torch.load(read_bytes(path))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from None
        if tensors.keys() != {"offsets", "values"}:
            raise ValueError(f"{path}: expected the tensors offsets and values, got {shown(sorted(tensors))}")
        try:
            return cls(tensors["values"], tensors["offsets"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def to_padded(self, fill: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the sets padded on the right with `fill`, `(n_sets, max_length, d)`, and their lengths `(n_sets,)`."""
        if self.may_have_rest and not torch.compiler.is_compiling():
            return self.trimmed().to_padded(fill)
        rows = torch.arange(self.values.shape[0], device=self.values.device)
        sets = self.set_index()
        padded = self.values.new_full((len(self), self.max_length, self.values.shape[1]), fill)
        padded = padded.index_put((sets, rows - self.offsets[sets]), self.values)
        return padded, self.lengths

    def set_index(self) -> Tensor:
        """Return the index of the set that each row belongs to, int64 `(N,)`.

        Raises:
            ValueError: rows follow the last set; `trimmed` removes them. (In a compiled function: RuntimeError.)
        """
        if self.may_have_rest and not torch.compiler.is_compiling():
            raise ValueError(
                "values: rows follow the last set, as after from_padded under torch.compile; remove them by trimmed()"
            )
        sets = torch.arange(len(self), device=self.values.device)
        return torch.repeat_interleave(sets, self.lengths, output_size=self.values.shape[0])

    def index_select(self, indices: Tensor) -> Fragments:
        """Return the sets `indices` as new Fragments.

        Args:
            indices: int32 or int64 `(m,)`, each from 0 to `n_sets - 1`, in any order; repeats are allowed.

        Raises:
            TypeError: `indices` has a wrong dtype or shape.
            ValueError: an index on the CPU is out of range.
        """
        rows = self.row_index(indices)
        return Fragments(self.values[rows], _offsets_of(self.lengths[indices.to(self.device)]), check=False)

    def row_index(self, indices: Tensor) -> Tensor:
        """Return the row numbers of the sets `indices` as `index_select` orders them, int64 `(n_rows,)`."""
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"indices: expected an int32 or int64 tensor of shape (m,), got {_describe(indices)}")
        indices = indices.to(device=self.offsets.device, dtype=torch.int64)
        if indices.device.type == "cpu" and bool(((indices < 0) | (indices >= len(self))).any()):
            raise ValueError(
                f"indices: expected values from 0 to {len(self) - 1}, got {int(indices.min())} to {int(indices.max())}"
            )
        lengths = self.lengths[indices]
        shift = torch.repeat_interleave(self.offsets[indices] - _offsets_of(lengths)[:-1], lengths)
        return shift + torch.arange(shift.shape[0], device=shift.device)

    @property
    def lengths(self) -> Tensor:
        """Number of rows of each set, `(n_sets,)` in the dtype of the offsets."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def knows_max_length(self) -> bool:
        """Whether `max_length` is known. If not, its first use synchronizes with a GPU."""
        return self._max_length is not None

    @property
    def max_length(self) -> int:
        """Number of rows of the longest set. The first use reads the offsets on the host."""
        if self._max_length is None:
            check_has_values("offsets", self.offsets)
            self._max_length = int(self.lengths.max()) if len(self) else 0
        return self._max_length

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def with_values(self, values: Tensor) -> Fragments:
        """Return the same sets with other vectors: `values` `(N, any width)`."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"values: expected {self.values.shape[0]} rows, got {tuple(values.shape)}")
        return self._like(values, self.offsets)

    def to(self, *args: Any, **kwargs: Any) -> Fragments:
        """Apply `Tensor.to` to the values. The offsets move to the same device and keep their dtype."""
        values = self.values.to(*args, **kwargs)
        non_blocking = bool(kwargs.get("non_blocking", False))
        offsets = self.offsets.to(values.device, non_blocking=non_blocking)
        return self._like(values, offsets)

    def pin_memory(self) -> Fragments:
        return self._like(self.values.pin_memory(), self.offsets.pin_memory())

    def _like(self, values: Tensor, offsets: Tensor) -> Fragments:
        found = Fragments(values, offsets, check=False, max_length=self._max_length)
        found._has_rest = self._has_rest
        return found

    def detach(self) -> Fragments:
        return self.with_values(self.values.detach())

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def __getitem__(self, index: int) -> Tensor:
        """Return set `index`, `(n_i, d)`. Negative indices count from the end."""
        if not isinstance(index, int):
            raise TypeError(f"index: expected an int (index_select takes several sets), got {_describe(index)}")
        if not -len(self) <= index < len(self):
            raise IndexError(f"set {index} of {len(self)}")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __repr__(self) -> str:
        rows, dim = self.values.shape
        return f"Fragments(sets={len(self)}, rows={rows}, d={dim}, dtype={self.dtype}, device='{self.device}')"


def has_values(tensor: Tensor) -> bool:
    """Return whether code may branch on the values: not in a compiled graph, nor for a fake or meta tensor."""
    return not torch.compiler.is_compiling() and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a fake or meta tensor; inside a compiled graph all tensors pass."""
    if not torch.compiler.is_compiling() and not has_values(tensor):
        raise ValueError(f"{name}: expected a tensor with values, got a fake or meta tensor, which has only a shape")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _checked_lengths(lengths: object, padded: Tensor) -> Tensor:
    if not isinstance(lengths, Tensor) or lengths.dtype not in _INTEGER:
        raise TypeError(f"lengths: expected an integer tensor, got {_describe(lengths)}")
    if lengths.shape != padded.shape[:1]:
        raise ValueError(f"lengths: expected shape ({padded.shape[0]},), got {tuple(lengths.shape)}")
    lengths, max_len = lengths.to(padded.device, torch.int64), padded.shape[1]
    if padded.device.type == "cpu" and has_values(lengths) and bool(((lengths < 0) | (lengths > max_len)).any()):
        raise ValueError(
            f"lengths: expected values from 0 to {max_len}, got {int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


def _valid_rows(mask: object, n_sets: int, max_len: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *_INTEGER):
        raise TypeError(f"mask: expected a bool or integer tensor, got {_describe(mask)}")
    if mask.shape != (n_sets, max_len):
        raise ValueError(f"mask: expected shape ({n_sets}, {max_len}), got {tuple(mask.shape)}")
    return mask != 0


def _check_like_first(name: str, index: int, tensor: Tensor, first: Tensor) -> None:
    if tensor.shape[1] != first.shape[1] or tensor.dtype != first.dtype or tensor.device != first.device:
        expected = f"width {first.shape[1]}, {first.dtype} and {first.device} like the first"
        raise ValueError(f"{name}[{index}]: expected {expected}, got {_describe(tensor)} on {tensor.device}")


def _offsets_of(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check_offsets(offsets: Tensor, n_rows: int, *, may_have_rest: bool = False) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"offsets: expected the first to be 0, got {first}")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"offsets: expected them never to fall, got {int(offsets[at])} then {int(offsets[at + 1])} at {at}"
        )
    if last != n_rows and not (may_have_rest and last < n_rows):
        raise ValueError(f"offsets: expected the last to be the number of rows {n_rows}, got {last}")


def _flatten(fragments: Fragments) -> tuple[list[Any], Any]:
    return [fragments.values, fragments.offsets], fragments._has_rest or None


def _unflatten(children: Iterable[Any], has_rest: Any) -> Fragments:
    # tree_map may replace the tensors by any object, so the constructor's checks must not run here.
    fragments = object.__new__(Fragments)
    fragments.values, fragments.offsets = children
    fragments._max_length, fragments._has_rest = None, bool(has_rest)
    return fragments


_pytree.register_pytree_node(Fragments, _flatten, _unflatten, serialized_type_name="itm_fast.Fragments")
