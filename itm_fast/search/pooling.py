"""Pool a set of rows into one vector, so that inner products of pooled vectors find what a model ranks first.

Inside: `Pooling`, `SetPooling`, `set_features`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.nn import l2norm
from itm_fast.search.members import Encodings

__all__ = ["Pooling", "SetPooling", "set_features"]

_SIDES = ("images", "captions")
_NAMES = ("landmarks", "projection", "bias")


def set_features(sets: Fragments, landmarks: Tensor) -> Tensor:
    """Describe sets by their mean row and by how well their best row fits each landmark.

    Args:
        sets: rows (N, d).
        landmarks: (L, d).

    Returns:
        (n_sets, d + L): the mean row, then the greatest inner product of a row with each landmark; zeros for a set
        without rows.
    """
    owners = sets.set_index()
    sums = sets.values.new_zeros(len(sets), sets.values.shape[1]).index_add(0, owners, sets.values)
    products = sets.values @ landmarks.t()
    best = products.new_full((len(sets), len(landmarks)), -torch.inf)
    best.scatter_reduce_(0, owners[:, None].expand_as(products), products, "amax")
    features = torch.cat([sums / sets.lengths.clamp(min=1)[:, None], best], 1)
    return features.masked_fill((sets.lengths == 0)[:, None], 0)


@attrs.frozen(eq=False)
class SetPooling:
    """A linear map of `set_features`, float32.

    Attributes:
        landmarks: (L, d).
        projection: (d + L, D).
        bias: (D,).
    """

    landmarks: Tensor
    projection: Tensor
    bias: Tensor

    def __call__(self, sets: Fragments) -> Tensor:
        """Return (n_sets, D)."""
        return set_features(sets, self.landmarks) @ self.projection + self.bias


class Pooling:
    """Pooled vectors of both sides; several models' vectors are concatenated, so that their inner products add up.

    A model with one vector per item keeps this vector: its inner products are the model's scores.

    Args:
        parts: for each model the learned pooling of images and of captions; None: the normalised mean of the rows, or
            the model's own vector.
    """

    def __init__(self, parts: Sequence[dict[str, SetPooling] | None]) -> None:
        self.parts = list(parts)

    def __call__(self, side: str, encodings: Encodings) -> Tensor:
        """Return (n, D) float32 for the embeddings of n images or captions."""
        return torch.cat([self._of(part, side, one) for part, one in zip(self.parts, encodings, strict=True)], 1)

    @staticmethod
    def _of(part: dict[str, SetPooling] | None, side: str, embeddings: Any) -> Tensor:
        if isinstance(embeddings, Tensor):
            return embeddings
        if part is not None:
            return part[side](embeddings)
        return l2norm(set_features(embeddings, embeddings.values[:0]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of learned poolings by name."""
        return {
            f"{member}.{side}.{name}": getattr(part[side], name)
            for member, part in enumerate(self.parts)
            if part is not None
            for side in _SIDES
            for name in _NAMES
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], members: int) -> Pooling:
        """Make a pooling from what `tensors` returned; ValueError if weights are missing or do not fit each other."""
        parts: list[dict[str, SetPooling] | None] = []
        for member in range(members):
            if f"{member}.images.landmarks" not in tensors:
                parts.append(None)
                continue
            part = {}
            for side in _SIDES:
                names = [f"{member}.{side}.{name}" for name in _NAMES]
                missing = [name for name in names if name not in tensors]
                if missing:
                    raise ValueError(f"damaged: there is no {missing[0]}")
                part[side] = one = SetPooling(*(tensors[name] for name in names))
                width = sum(one.landmarks.shape) if one.landmarks.dim() == 2 else -1
                if one.projection.shape != (width, *one.bias.shape):
                    raise ValueError(f"damaged: the shape of {names[1]}")
            parts.append(part)
        return cls(parts)
