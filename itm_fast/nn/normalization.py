"""L2 normalisation as the field's encoders use it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["l2norm"]


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-8) -> Tensor:
    """Return `x / (|x| + eps)` along `dim`.

    A vector that is exactly zero receives no gradient: it has no direction, and its derivative would be `1 / eps`. So a
    blank region or a row of padding does not drown the gradients of the others.

    Args:
        x: any shape, floating dtype. Norms and quotients of 16-bit numbers are computed in float32 and rounded once.

    Returns:
        The shape and dtype of `x`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=wide)
    return (x / (norm + eps).masked_fill(norm == 0, torch.inf)).to(x.dtype)
