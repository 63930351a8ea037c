"""Turn arrays and lists that users pass into tensors.

Inside: `ArrayLike`, `as_integers`, `as_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.files.messages import shown

__all__ = ["ArrayLike", "as_integers", "as_tensor"]

ArrayLike = Tensor | np.ndarray | Sequence[Any]


def as_tensor(name: str, values: ArrayLike) -> Tensor:
    """Return a tensor as it is, and a copy of an array or a list of numbers as a tensor.

    Raises:
        TypeError: `values` are not numbers, or rows have different lengths; `name` is the argument in the message.
    """
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
        # A copy: torch warns of arrays that cannot be written, such as memory maps. It takes native byte order only.
        return torch.tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a tensor, an array or a list of numbers, got {shown(values)}") from None


def as_integers(name: str, values: ArrayLike) -> Tensor:
    """Return int64 numbers, as `as_tensor`; TypeError if they are not integers."""
    tensor = as_tensor(name, values)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
        raise TypeError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.to(torch.int64)
