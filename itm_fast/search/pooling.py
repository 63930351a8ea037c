"""Pool a set of rows into one vector, so that inner products of pooled vectors find what a model ranks first.

Inside: `Pooling`, `SetPooling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn import l2norm
from itm_fast.search.members import Encodings

__all__ = ["Pooling", "SetPooling", "mean_rows"]

_HIDDEN = 512
_SIDES = ("images", "captions")


def mean_rows(sets: Fragments, values: Tensor | None = None) -> Tensor:
    """Return the mean row of each set, (n_sets, width); zeros for a set without rows."""
    values = sets.values if values is None else values
    sums = values.new_zeros(len(sets), values.shape[1]).index_add(0, sets.set_index(), values)
    return sums / sets.lengths.clamp(min=1)[:, None]


class SetPooling(nn.Module):
    """A learned vector of a set: `l2norm(A mean(x) + B mean(relu(C x + c)))`, times a scale.

    It starts as the mean of the rows: B is zero and A the identity.

    Args:
        width: width d of the rows, and of the vector.
        hidden: rows of C.
    """

    def __init__(self, width: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.out.weight)

    def forward(self, sets: Fragments) -> Tensor:
        """Return (n_sets, width) of rows (N, width)."""
        features = mean_rows(sets, self.hidden(sets.values).relu())
        return self.scale * l2norm(self.linear(mean_rows(sets)) + self.out(features))


class Pooling:
    """Pooled vectors of both sides; several models' vectors are concatenated, so that their inner products add up.

    A model with one vector per item keeps this vector: its inner products are the model's scores.

    Args:
        parts: for each model the learned pooling of images and of captions; None: the normalised mean of the rows, or
            the model's own vector.
    """

    def __init__(self, parts: Sequence[dict[str, SetPooling] | None]) -> None:
        self.parts = list(parts)

    @property
    def kind(self) -> str:
        return "mean" if all(part is None for part in self.parts) else "learned"

    @torch.no_grad()
    def __call__(self, side: str, encodings: Encodings) -> Tensor:
        """Return (n, D) float32 for the embeddings of n images or captions."""
        return torch.cat([self._of(part, side, one) for part, one in zip(self.parts, encodings, strict=True)], 1)

    @staticmethod
    def _of(part: dict[str, SetPooling] | None, side: str, embeddings: Any) -> Tensor:
        if isinstance(embeddings, Tensor):
            return embeddings
        return l2norm(mean_rows(embeddings)) if part is None else part[side](embeddings)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of learned poolings by name."""
        return {
            f"{member}.{side}.{name}": tensor.detach()
            for member, part in enumerate(self.parts)
            if part is not None
            for side in _SIDES
            for name, tensor in part[side].state_dict().items()
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], members: int) -> Pooling:
        """Make a pooling from what `tensors` returned; ValueError if weights are missing or have other shapes."""
        parts: list[dict[str, SetPooling] | None] = []
        for member in range(members):
            if f"{member}.images.hidden.weight" not in tensors:
                parts.append(None)
                continue
            part = {}
            for side in _SIDES:
                prefix = f"{member}.{side}."
                state = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
                try:
                    hidden, width = state["hidden.weight"].shape
                    part[side] = SetPooling(width, hidden)
                    part[side].load_state_dict(state)
                except (KeyError, ValueError, RuntimeError) as error:
                    raise ValueError(f"weights of the pooling: {str(error).splitlines()[0]}") from None
            parts.append(part)
        return cls(parts)
