"""Layers that compute several groups with separate weights in one product.

Inside: `GroupedLinear`, `GroupedRowNorm`, `GroupedAttention`, `GroupedPooling`, `of_group`, `stacked_vectors`.
Activations are `(groups, rows, width)`: those of one group are contiguous. With `only`, that group alone is computed;
the result is `(1, rows, width)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.generalized_pooling import GeneralizedPooling
from itm_fast.nn.image_encoder import narrowed
from itm_fast.nn.pooling import mean_pool
from itm_fast.nn.region_attention import RegionAttention

__all__ = ["GroupedAttention", "GroupedLinear", "GroupedPooling", "GroupedRowNorm", "of_group", "stacked_vectors"]


class GroupedLinear(nn.Module):
    """`y_g = x_g W_g^T + b_g` for each group g.

    Args:
        groups: number of groups.
        in_features, out_features: widths.
        xavier: initialise Xavier-uniform with zero bias, as the image encoders do; otherwise as `nn.Linear`.
    """

    def __init__(self, groups: int, in_features: int, out_features: int, *, xavier: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(groups, out_features))
        bound = 1 / math.sqrt(in_features)
        if xavier:
            bound = math.sqrt(6 / (in_features + out_features))
        nn.init.uniform_(self.weight, -bound, bound)
        if not xavier:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows: Tensor, only: int | None = None) -> Tensor:
        """Map rows (R, in), shared by all groups, or (groups, R, in), to (groups, R, out).

        Shared rows take one wide product, others one batched product.
        """
        weight, bias = of_group(self.weight, only), of_group(self.bias, only)
        rows = narrowed(rows, weight)
        if rows.dim() == 2:
            wide = F.linear(rows, weight.flatten(0, 1), bias.flatten())
            return wide.view(len(rows), *bias.shape).transpose(0, 1)
        return torch.baddbmm(bias[:, None], rows, weight.transpose(1, 2))


class GroupedRowNorm(nn.Module):
    """Batch normalisation of the rows of each group.

    In training mode, the statistics are those of the rows; the running statistics follow with momentum 0.1. A single
    group (`only`), or fewer than two rows, use the running statistics and do not change them.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, groups: int, width: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(groups, width))
        self.bias = nn.Parameter(torch.zeros(groups, width))
        self.register_buffer("running_mean", torch.zeros(groups, width))
        self.register_buffer("running_var", torch.ones(groups, width))

    def forward(self, rows: Tensor, only: int | None = None) -> Tensor:
        """Rows (groups, R, width) to the same shape."""
        groups, count, width = rows.shape
        flat = rows.transpose(0, 1).reshape(count, groups * width)
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        mean, variance, weight, bias = (of_group(tensor, only).flatten() for tensor in tensors)
        training = self.training and only is None and count > 1
        normed = F.batch_norm(flat, mean, variance, weight, bias, training, self.momentum, self.eps)
        return normed.view(count, groups, width).transpose(0, 1)


def stacked_vectors(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the biases and the weights of normalisations in `module` that are stacked by groups: (groups, width)."""
    for part in module.modules():
        if isinstance(part, GroupedRowNorm):
            yield part.weight
        if isinstance(part, GroupedRowNorm | GroupedLinear):
            yield part.bias


class GroupedAttention(nn.Module):
    """Let the rows of each set attend to each other, by each group's `RegionAttention`."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(RegionAttention(width) for _ in range(groups))

    def forward(self, sets: Fragments, rows: Tensor, only: int | None = None) -> Tensor:
        """Rows (groups, R, d) of the R rows of `sets` to the same shape."""
        parts = list(self.parts) if only is None else [self.parts[only]]
        return torch.stack([part(sets.with_values(own)).values for part, own in zip(parts, rows, strict=True)])


class GroupedPooling(nn.Module):
    """Pool the rows of each set to one vector: by the mean ("mean"), or by each group's GPO ("gpo")."""

    def __init__(self, groups: int, kind: str) -> None:
        super().__init__()
        self.pools = nn.ModuleList(GeneralizedPooling() for _ in range(groups)) if kind == "gpo" else None

    def forward(self, sets: Fragments, rows: Tensor, only: int | None = None) -> Tensor:
        """Rows (groups, R, d) of the R rows of `sets` to (groups, n_sets, d)."""
        if self.pools is None:
            groups, count, width = rows.shape
            means = mean_pool(sets.with_values(rows.transpose(0, 1).reshape(count, groups * width)))
            return means.view(len(sets), groups, width).transpose(0, 1)
        pools = list(self.pools) if only is None else [self.pools[only]]
        return torch.stack([pool(sets.with_values(own)) for pool, own in zip(pools, rows, strict=True)])


def of_group(tensor: Tensor, only: int | None) -> Tensor:
    """Return all groups of `tensor` (groups, ...), or one of them as (1, ...)."""
    return tensor if only is None or len(tensor) == 1 else tensor[only : only + 1]
