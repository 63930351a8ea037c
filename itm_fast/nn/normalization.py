"""L2 normalisation as the field's encoders use it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["l2norm"]


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-8) -> Tensor:
    """`x / (|x| + eps)` along `dim`, for `x` of any shape and floating dtype, which is that of the result.

    Norm and quotient of 16-bit numbers are computed in float32, under autocast on any device, and rounded once. The
    derivative of the norm at an exactly zero vector is taken as zero, so that a blank region or an untrained bias of
    zeros never makes a NaN.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x / (torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=wide) + eps)).to(x.dtype)
