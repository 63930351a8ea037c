"""Sets of one side of a batch in any supported container (`Sets`), and the selection of some of these sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from itm_fast.fragments import Fragments

__all__ = ["Sets", "Side", "form_of", "leaves_of", "rows_of", "side_of", "values_of"]

# Fragments, tensors with one row per set, and tuples, lists and dicts of these.
Sets = Any


@dataclass(frozen=True)
class Side:
    """Structure of the sets of one side. Their values are passed separately, so that autograd sees them."""

    count: int
    parts: list[Fragments | None]  # one per tensor, see `form_of`
    spec: Any

    def select(self, numbers: Tensor, values: Sequence[Tensor], rising: bool) -> tuple[Sets, list[Tensor], list[Any]]:
        """Return the sets with indices `numbers`, their detached tensors, and the source rows of each tensor.

        `rising`: the indices are strictly increasing.
        """
        leaves: list[Any] = []
        chosen, places = [], []
        for part, value in zip(self.parts, values, strict=True):
            # With all sets, skip the search for their rows: it would synchronize the GPU.
            every = rising and len(numbers) == self.count
            place: Any = ... if every else rows_of(part, numbers)
            value = value.detach()[place]
            if part is None:
                leaves.append(value)
            else:
                leaves.append((part if every else part.index_select(numbers)).with_values(value))
            chosen.append(value)
            places.append(place)
        return _pytree.tree_unflatten(leaves, self.spec), chosen, places

    def joined(self, values: Sequence[Tensor]) -> Sets:
        """Return all sets with the tensors `values`."""
        pairs = zip(self.parts, values, strict=True)
        leaves = [value if part is None else part.with_values(value) for part, value in pairs]
        return _pytree.tree_unflatten(leaves, self.spec)

    def lengths(self) -> Tensor | None:
        """Return the number of rows per set in the first tensor with several rows per set."""
        return next((part.lengths for part in self.parts if part is not None), None)


def side_of(name: str, sets: Sets) -> tuple[Side, list[Tensor]]:
    """Return the structure of `sets` and their tensors; error messages call the sets `name`.

    Raises:
        TypeError: a part has an unsupported type, or there are no parts.
        ValueError: parts differ in the number of sets.
    """
    leaves, spec = leaves_of(sets)
    parts: list[Fragments | None] = []
    tensors, counts = [], []
    for leaf in leaves:
        if not isinstance(leaf, Fragments | Tensor) or (isinstance(leaf, Tensor) and leaf.dim() == 0):
            raise TypeError(f"{name}: expected Fragments or tensors of one row per set, got {type(leaf).__name__}")
        counts.append(len(leaf))
        parts.append(form_of(leaf))
        tensors.append(values_of(leaf))
    if not counts:
        raise TypeError(f"{name}: expected Fragments or tensors of one row per set, got none")
    if len(set(counts)) != 1:
        raise ValueError(f"{name}: expected the same number of sets in each part, got {counts}")
    return Side(counts[0], parts, spec), tensors


def leaves_of(sets: Sets) -> tuple[list[Any], Any]:
    """Return the Fragments and tensors in `sets`, and the structure of their container."""
    return _pytree.tree_flatten(sets, is_leaf=lambda leaf: isinstance(leaf, Fragments))


def form_of(leaf: Fragments | Tensor) -> Fragments | None:
    """Return which rows form each set, as Fragments without channels (no memory). None: one row per set."""
    if isinstance(leaf, Tensor):
        return None
    return leaf.with_values(leaf.values.new_empty(leaf.values.shape[0], 0))


def values_of(leaf: Fragments | Tensor) -> Tensor:
    """Return the rows of one part."""
    return leaf.values if isinstance(leaf, Fragments) else leaf


def rows_of(part: Fragments | None, numbers: Tensor) -> Tensor:
    """Return the rows of the sets with indices `numbers` in a tensor with structure `part`."""
    return numbers if part is None else part.row_index(numbers)
