"""Encode region features by a linear layer with a residual perceptron."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import as_regions, detach_blank_rows, linear_layer
from itm_fast.nn.normalization import l2norm
from itm_fast.reference import validation

__all__ = ["ResidualImageEncoder"]


class ResidualImageEncoder(nn.Module):
    """Encode regions as `l2norm(fc(x) + MLP(x))`: a linear layer plus a two-layer perceptron.

    The perceptron has a hidden layer of half the embedding's width with batch normalisation and ReLU. Sources: Chen et
    al., "Learning the Best Pooling Strategy for Visual Semantic Embedding" (CVPR 2021), and RCAR. RVSE++ applies it
    to the projected features, `fc(x) + MLP(fc(x))`, and its baseline VSE (MLP) has no sum, `MLP(fc(x))` (Li et al.,
    "Selectively Hard Negative Mining for Alleviating Gradient Vanishing in Image-Text Matching", Figure 2). Appendix A
    of RVSE++ counts two batch normalisations. Its official code creates the second one for the output of the last layer
    but never calls it: `norms` chooses. Padding does not enter the statistics of the batch normalisation.

    Args:
        feature_dim: width f of the region features.
        embed_dim: width d of the embeddings.
        projected: the input of the perceptron is `fc(x)` (RVSE++) instead of `x`.
        residual: False leaves out the sum: the perceptron's output is the embedding (VSE (MLP)).
        norms: 1, as coded; 2 also normalises the output of the perceptron over the batch, as the paper draws it.
        no_imgnorm: leave the l2 normalisation out.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(
        self,
        feature_dim: int,
        embed_dim: int,
        *,
        projected: bool = False,
        residual: bool = True,
        norms: int = 1,
        no_imgnorm: bool = False,
    ) -> None:
        super().__init__()
        validation.check_sizes(feature_dim=feature_dim, embed_dim=embed_dim)
        if not (projected or residual):
            raise ValueError("residual: expected True where the perceptron sees the features; fc(x) is lost otherwise")
        if norms not in (1, 2):
            raise ValueError(f"norms: expected 1 or 2, got {norms}")
        self.projected, self.residual, self.no_imgnorm = projected, residual, no_imgnorm
        hidden = max(embed_dim // 2, 1)
        self.fc = linear_layer(feature_dim, embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim if projected else feature_dim, hidden),
            RowNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, embed_dim),
            *([RowNorm(embed_dim)] if norms == 2 else []),
        )

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """`features` (n, k, f), or Fragments of rows (N, f), to Fragments of rows (n * k or N, d)."""
        regions = as_regions(features, self.fc.in_features)
        embedded = self.fc(regions.values)
        added = self.mlp(embedded if self.projected else regions.values)
        embedded = detach_blank_rows(embedded + added if self.residual else added, regions.values)
        return regions.with_values(embedded if self.no_imgnorm else l2norm(embedded))


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation of rows. Fewer than two rows use the running statistics and do not change them."""

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and rows.shape[0] < 2:
            return F.batch_norm(rows, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(rows)
