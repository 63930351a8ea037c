"""Euclidean norms with derivatives of any order.

Inside: `norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm"]


def norm(vectors: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    """Return the norms along `dim`. All derivatives of a zero vector are zero; those of `vector_norm` become NaN."""
    squared = vectors.square().sum(dim=dim, keepdim=keepdim)
    # The norm of a vector with NaN stays NaN.
    return torch.where(squared == 0, 1.0, squared).sqrt() * (squared != 0)
