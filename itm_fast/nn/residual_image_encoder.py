"""Region features to region embeddings through a linear layer with a small network beside it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import as_regions, linear_layer
from itm_fast.nn.normalization import l2norm

__all__ = ["ResidualImageEncoder"]


class ResidualImageEncoder(nn.Module):
    """`l2norm(fc(x) + MLP(x))` per region: a linear layer, and a residual that a two-layer perceptron adds.

    The perceptron has a hidden layer of half the embedding's width with batch normalisation and ReLU. Sources: Chen et
    al., "Learning the Best Pooling Strategy for Visual Semantic Embedding" (CVPR 2021), and RCAR, where it sees the
    features; RVSE++ has it on the projected features, `fc(x) + MLP(fc(x))`, and VSE (MLP), which it is compared with,
    in a row, `MLP(fc(x))` (Li et al., "Selectively Hard Negative Mining for Alleviating Gradient Vanishing in
    Image-Text Matching", Figure 2). Its appendix A counts two batch normalisations; its public code makes the second,
    behind the last layer, and never calls it: there is none here. The statistics of the batch normalisation are those
    of regions alone: padding never enters them.

    Args:
        feature_dim: width f of the region features.
        embed_dim: width d of the embeddings.
        projected: the perceptron sees `fc(x)` (RVSE++) in place of `x`.
        residual: False leaves the sum out, so that the perceptron's output is the embedding (VSE (MLP)).
        no_imgnorm: leave the l2 normalisation out.
    """

    def __init__(
        self,
        feature_dim: int,
        embed_dim: int,
        *,
        projected: bool = False,
        residual: bool = True,
        no_imgnorm: bool = False,
    ) -> None:
        super().__init__()
        if not (projected or residual):
            raise ValueError("residual: expected True where the perceptron sees the features; fc(x) is lost otherwise")
        self.projected, self.residual, self.no_imgnorm = projected, residual, no_imgnorm
        hidden = max(embed_dim // 2, 1)
        self.fc = linear_layer(feature_dim, embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim if projected else feature_dim, hidden),
            RowNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, embed_dim),
        )

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """`features` (n, k, f), or Fragments of rows (N, f), to Fragments of rows (n * k or N, d)."""
        regions = as_regions(features, self.fc.in_features)
        embedded = self.fc(regions.values)
        added = self.mlp(embedded if self.projected else regions.values)
        embedded = embedded + added if self.residual else added
        return regions.with_values(embedded if self.no_imgnorm else l2norm(embedded))


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation of rows; fewer than two have no variance and take the running statistics, which they keep."""

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and rows.shape[0] < 2:
            return F.batch_norm(rows, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(rows)
