"""The last step of scores, in at least float32: `inner_products` of two vectors, `wide_linear` for other heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itm_fast.ops.precision import without_autocast

__all__ = ["inner_products", "wide_linear"]


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


def wide_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Apply the last layer of a head in float32 (float64 for float64 inputs or weights), also under autocast.

    In bfloat16 it would turn close scores into ties.

    Args:
        layer: the layer.
        inputs: `(..., layer.in_features)`, of any floating point dtype.
    """
    dtype = torch.promote_types(torch.promote_types(inputs.dtype, layer.weight.dtype), torch.float32)
    bias: Tensor | None = layer.bias
    with without_autocast(inputs.device.type):
        return F.linear(inputs.to(dtype), layer.weight.to(dtype), None if bias is None else bias.to(dtype))
