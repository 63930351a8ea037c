"""Scores of embeddings with one vector per item."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inner_products"]


def inner_products(images: Tensor, captions: Tensor) -> Tensor:
    """Score images `(n, d)` with captions `(m, d)`: `(n, m)`, images are rows. Unit vectors give cosines.

    Scores are computed in float32 (float64 for float64 embeddings), also under autocast: bfloat16 would turn close
    scores into ties.
    """
    for name, embeddings in (("images", images), ("captions", captions)):
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 2 or not embeddings.is_floating_point():
            raise ValueError(f"{name}: expected a floating point tensor of shape (n, d)")
    if images.shape[1] != captions.shape[1]:
        raise ValueError(f"captions: expected width {images.shape[1]} as the images have, got {captions.shape[1]}")
    dtype = torch.promote_types(torch.promote_types(images.dtype, captions.dtype), torch.float32)
    with torch.autocast(images.device.type, enabled=False):
        return images.to(dtype) @ captions.to(dtype).t()
