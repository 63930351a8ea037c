"""Region features to region embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments, has_values
from itm_fast.nn.normalization import l2norm
from itm_fast.reference import validation

__all__ = ["ImageEncoder"]


class ImageEncoder(nn.Module):
    """Encode regions by a linear layer and l2 normalisation, as SCAN does.

    The weight is Xavier-uniform, the bias starts at zero.

    Args:
        feature_dim: width f of the region features.
        embed_dim: width d of the embeddings.
        no_imgnorm: leave the l2 normalisation out.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(self, feature_dim: int, embed_dim: int, *, no_imgnorm: bool = False) -> None:
        super().__init__()
        validation.check_sizes(feature_dim=feature_dim, embed_dim=embed_dim)
        self.no_imgnorm = no_imgnorm
        self.fc = linear_layer(feature_dim, embed_dim)

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """`features` (n, k, f), or Fragments of rows (N, f), to Fragments of rows (n * k or N, d)."""
        regions = as_regions(features, self.fc.in_features)
        embedded = detach_blank_rows(self.fc(regions.values), regions.values)
        return regions.with_values(embedded if self.no_imgnorm else l2norm(embedded))


def linear_layer(feature_dim: int, embed_dim: int) -> nn.Linear:
    """Create a linear layer with a Xavier-uniform weight and zero bias."""
    layer = nn.Linear(feature_dim, embed_dim)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def narrowed(rows: Tensor, weight: Tensor) -> Tensor:
    """Return `rows` in the dtype of a 16-bit `weight`, as a model has after `.half()`; other rows unchanged."""
    return rows.to(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else rows


def detach_blank_rows(embedded: Tensor, rows: Tensor) -> Tensor:
    """Return `embedded`, without gradient for rows that are exactly zero: padding and blank pictures.

    A layer turns such a row into its bias, which is zero at first and then tiny. The direction of a tiny vector has a
    huge derivative, which would dominate those of all other rows.

    Args:
        embedded: `(..., N, d)`, what the layers make of `rows`.
        rows: `(N, f)`.
    """
    if not (torch.is_grad_enabled() and embedded.requires_grad):
        return embedded
    blank = ~rows.any(dim=1, keepdim=True)
    # Most batches have none. On a GPU, asking would cost more than the selection.
    if rows.device.type == "cpu" and has_values(rows) and not bool(blank.any()):
        return embedded
    return torch.where(blank, embedded.detach(), embedded)


def as_regions(features: Tensor | Fragments, feature_dim: int) -> Fragments:
    """Check region features `(n, k, f)` or Fragments of rows `(N, f)`, and return them as Fragments."""
    if isinstance(features, Tensor):
        if features.dim() != 3 or not features.is_floating_point():
            raise ValueError(
                f"features: expected a floating point tensor (n, k, {feature_dim}) or Fragments, "
                f"got {features.dtype} of shape {tuple(features.shape)}"
            )
        features = Fragments.from_padded(features)
    elif not isinstance(features, Fragments):
        raise TypeError(
            f"features: expected a tensor (n, k, {feature_dim}) or Fragments, got {type(features).__name__}"
        )
    if features.values.shape[1] != feature_dim:
        raise ValueError(f"features: expected {feature_dim} values per region, got {features.values.shape[1]}")
    return features
