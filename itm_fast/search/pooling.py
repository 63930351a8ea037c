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
_NAMES = ("landmarks", "words", "projection", "bias")
_BLEND = "blend"
# Of the softmax over words; chosen on captions of the emoji that were not trained on.
_SHARPNESS = 20.0


def set_features(sets: Fragments, landmarks: Tensor, words: Tensor) -> Tensor:
    """Describe sets by their mean row, by how well their best row fits each landmark, and by which words they contain.

    Args:
        sets: rows (N, d).
        landmarks: (L, d).
        words: (W, d).

    Returns:
        (n_sets, d + L + W): the mean row, the greatest inner product of a row with each landmark, and the mean over the
        rows of the softmax of 20 times their cosines with all words; zeros for a set without rows.
    """
    owners, counts = sets.set_index(), sets.lengths.clamp(min=1)[:, None]

    def mean(rows: Tensor) -> Tensor:
        return rows.new_zeros(len(sets), rows.shape[1]).index_add(0, owners, rows) / counts

    products = sets.values @ landmarks.t()
    best = products.new_full((len(sets), len(landmarks)), -torch.inf)
    best.scatter_reduce_(0, owners[:, None].expand_as(products), products, "amax")
    parts = [mean(sets.values), best]
    if len(words):
        cosines = l2norm(sets.values) @ l2norm(words).t()
        parts.append(mean((_SHARPNESS * cosines).softmax(1)))
    return torch.cat(parts, 1).masked_fill((sets.lengths == 0)[:, None], 0)


@attrs.frozen(eq=False)
class SetPooling:
    """A linear map of `set_features`, float32.

    Attributes:
        landmarks: (L, d).
        words: (W, d).
        projection: (d + L + W, D).
        bias: (D,).
    """

    landmarks: Tensor
    words: Tensor
    projection: Tensor
    bias: Tensor

    def __call__(self, sets: Fragments) -> Tensor:
        """Return (n_sets, D)."""
        return set_features(sets, self.landmarks, self.words) @ self.projection + self.bias


class Pooling:
    """Pooled vectors of both sides; several models' vectors are concatenated, so that their inner products add up.

    A model with one vector per item keeps this vector: its inner products are the model's scores.

    Args:
        parts: for each model the learned pooling of images and of captions; None: the normalised mean of the rows, or
            the model's own vector.
        blend: weights of the inner product and of MaxSim in the order of the shortlist; None: MaxSim alone.
    """

    def __init__(self, parts: Sequence[dict[str, SetPooling] | None], blend: tuple[float, float] | None = None) -> None:
        self.parts, self.blend = list(parts), blend

    def __call__(self, side: str, encodings: Encodings) -> Tensor:
        """Return (n, D) float32 for the embeddings of n images or captions."""
        return torch.cat([self._of(part, side, one) for part, one in zip(self.parts, encodings, strict=True)], 1)

    @staticmethod
    def _of(part: dict[str, SetPooling] | None, side: str, embeddings: Any) -> Tensor:
        if isinstance(embeddings, Tensor):
            return embeddings
        if part is not None:
            return part[side](embeddings)
        none = embeddings.values[:0]
        return l2norm(set_features(embeddings, none, none))

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of learned poolings by name."""
        found = {
            f"{member}.{side}.{name}": getattr(part[side], name)
            for member, part in enumerate(self.parts)
            if part is not None
            for side in _SIDES
            for name in _NAMES
        }
        return {**found, _BLEND: torch.tensor(self.blend)} if found and self.blend is not None else found

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
                # Earlier versions had no words.
                tensors = {names[1]: tensors.get(names[0], torch.empty(0))[:0], **tensors}
                missing = [name for name in names if name not in tensors]
                if missing:
                    raise ValueError(f"damaged: there is no {missing[0]}")
                part[side] = one = SetPooling(*(tensors[name] for name in names))
                flat = all(rows.dim() == 2 for rows in (one.landmarks, one.words))
                width = sum(one.landmarks.shape) + len(one.words) if flat else -1
                if one.projection.shape != (width, *one.bias.shape):
                    raise ValueError(f"damaged: the shape of {names[2]}")
            parts.append(part)
        blend = tensors.get(_BLEND)
        if blend is not None and (blend.shape != (2,) or not bool(blend.isfinite().all())):
            raise ValueError(f"damaged: {_BLEND}")
        return cls(parts, None if blend is None else (float(blend[0]), float(blend[1])))
