"""The sets that functions over whole sides of a batch take, whatever holds them, and the choice of some of them.

Inside: `Sets`, `Side`, `side_of`, and `leaves_of`, `form_of`, `values_of` and `rows_of` of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.utils import _pytree

from itm_fast.fragments import Fragments

__all__ = ["Sets", "Side", "form_of", "leaves_of", "rows_of", "side_of", "values_of"]

# Fragments, tensors whose first dimension counts the sets, and tuples, lists and dicts of them.
Sets = Any


@attrs.frozen
class Side:
    """The form of one kind of sets; their values travel beside it, for autograd to see."""

    count: int
    parts: list[Fragments | None]  # of each tensor, as `form_of`
    spec: Any

    def select(self, numbers: Tensor, values: Sequence[Tensor], rising: bool) -> tuple[Sets, list[Tensor], list[Any]]:
        """The sets `numbers`, their tensors cut off from any graph, and where the rows of these come from.

        `rising`: the numbers rise, none stands twice.
        """
        leaves: list[Any] = []
        chosen, places = [], []
        for part, value in zip(self.parts, values, strict=True):
            # All sets are themselves: looking for their rows would wait for a GPU.
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
        """All sets, with the tensors `values`."""
        pairs = zip(self.parts, values, strict=True)
        leaves = [value if part is None else part.with_values(value) for part, value in pairs]
        return _pytree.tree_unflatten(leaves, self.spec)

    def lengths(self) -> Tensor | None:
        """Rows of each set in the first tensor that has several for each."""
        return next((part.lengths for part in self.parts if part is not None), None)


def side_of(name: str, sets: Sets) -> tuple[Side, list[Tensor]]:
    """The form of `sets`, which messages call `name`, and their tensors.

    Raises:
        TypeError: something else is among them, or nothing.
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
    """The Fragments and tensors in `sets`, and the form that holds them."""
    return _pytree.tree_flatten(sets, is_leaf=lambda leaf: isinstance(leaf, Fragments))


def form_of(leaf: Fragments | Tensor) -> Fragments | None:
    """Which rows make a set, in Fragments without channels, which hold no memory; None: one row does."""
    if isinstance(leaf, Tensor):
        return None
    return leaf.with_values(leaf.values.new_empty(leaf.values.shape[0], 0))


def values_of(leaf: Fragments | Tensor) -> Tensor:
    """The rows of one part."""
    return leaf.values if isinstance(leaf, Fragments) else leaf


def rows_of(part: Fragments | None, numbers: Tensor) -> Tensor:
    """The rows of the sets `numbers` in a tensor of the form `part`."""
    return numbers if part is None else part.row_index(numbers)
