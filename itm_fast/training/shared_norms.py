"""Batch normalization over the rows of all processes, on any device and with any number of rows per process.

Statistics and gradients equal those of one process with all rows. torch's SyncBatchNorm runs only on GPUs, and it would
count the placeholder row of a process without data.

Inside: `SharedBatchNorm`, `SharedGroupedNorm`, `share_norms`, `shared_norms`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from itm_fast.distributed import World, gather_rows
from itm_fast.nn.grouped import GroupedRowNorm
from itm_fast.nn.residual_image_encoder import RowNorm

__all__ = ["SharedBatchNorm", "SharedGroupedNorm", "share_norms", "shared_norms"]

# What `SharedBatchNorm` computes over all processes.
_REPLACED = (_BatchNorm.forward, nn.SyncBatchNorm.forward, RowNorm.forward)


class SharedBatchNorm(_BatchNorm):
    """Replace `norm`, with the same weights and running statistics, but normalize over all processes in training mode.

    If all processes together have fewer than two rows, the running statistics are used and kept.

    Attributes:
        counted: whether the rows of this process count. False if they are placeholders.
    """

    def __init__(self, norm: _BatchNorm, world: World) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.train(norm.training)
        self.world, self.counted = world, True

    def forward(self, values: Tensor) -> Tensor:
        """Normalize values (n, c) or (n, c, ...)."""
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        assert self.momentum is not None
        if not self.training:
            return F.batch_norm(values, mean, variance, self.weight, self.bias, eps=self.eps)
        last = values.movedim(1, -1)
        normed, several = _normalized(
            last.reshape(-1, self.num_features),
            (self.weight, self.bias),
            (mean, variance),
            self.eps,
            self.momentum,
            self,
        )
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(several.view(()))
        return normed.view(last.shape).movedim(-1, 1)


class SharedGroupedNorm(GroupedRowNorm):
    """Like `SharedBatchNorm`, separately for each group of rows. A single group uses the running statistics."""

    def __init__(self, norm: GroupedRowNorm, world: World) -> None:
        super().__init__(*norm.weight.shape, eps=norm.eps, momentum=norm.momentum)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.train(norm.training)
        self.world, self.counted = world, True

    def forward(self, rows: Tensor, only: int | None = None) -> Tensor:
        """Normalize rows (groups, R, width)."""
        if not self.training or only is not None:
            return super().forward(rows, only)
        groups, count, width = rows.shape
        normed, _ = _normalized(
            rows.transpose(0, 1).reshape(count, groups * width),
            (self.weight.flatten(), self.bias.flatten()),
            (self.running_mean.view(-1), self.running_var.view(-1)),
            self.eps,
            self.momentum,
            self,
        )
        return normed.view(count, groups, width).transpose(0, 1)


def share_norms(model: nn.Module, world: World, but: Collection[str] = ()) -> None:
    """Replace the batch normalizations in `model` by shared ones, except in the modules named in `but`.

    A subclass with its own `forward` may compute more. It is kept if it is in evaluation mode, as its statistics are
    then the same in all processes.

    Raises:
        ValueError: a batch normalization has no momentum or no running statistics, or is in training mode and has its
            own `forward`.
    """
    for name, part in list(model.named_children()):
        if name in but:
            continue
        if isinstance(part, SharedBatchNorm | SharedGroupedNorm):
            continue
        if isinstance(part, _BatchNorm):
            if type(part).forward not in _REPLACED:
                if part.training:
                    raise ValueError(
                        f"{name}: several processes cannot share the statistics of {type(part).__name__}, a batch "
                        "normalization with its own forward; use torch's, or keep it in evaluation mode"
                    )
                continue
            if part.momentum is None or part.running_mean is None:
                raise ValueError(
                    f"{name}: several processes need batch normalization with a momentum and running statistics"
                )
            setattr(model, name, SharedBatchNorm(part, world))
        elif isinstance(part, GroupedRowNorm):
            setattr(model, name, SharedGroupedNorm(part, world))
        else:
            share_norms(part, world)


def shared_norms(model: nn.Module) -> list[SharedBatchNorm | SharedGroupedNorm]:
    """Return the shared batch normalizations in `model`."""
    return [part for part in model.modules() if isinstance(part, SharedBatchNorm | SharedGroupedNorm)]


def _normalized(
    rows: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor, Tensor],
    eps: float,
    momentum: float,
    norm: SharedBatchNorm | SharedGroupedNorm,
) -> tuple[Tensor, Tensor]:
    """Return rows (n, c) normalized, and whether there were at least two. If so, update the `running` statistics in
    place.
    """
    normed, mean, variance, count = _Normalize.apply(rows, *affine, *running, eps, norm.counted, norm.world)
    several = count > 1
    with torch.no_grad():
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for kept, new in zip(running, (mean, unbiased), strict=True):
            kept.copy_(torch.where(several, kept.lerp(new.to(kept.dtype), momentum), kept))
    return normed, several


class _Normalize(torch.autograd.Function):
    """Normalize by the mean and variance of all rows, and return these and the row count, which nothing needs to wait
    for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        counted: bool,
        world: World,
    ) -> tuple[Tensor, ...]:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        count, mean, squares = _together(_moments(wide if counted else wide[:0]), world)
        several = count > 1
        mean = torch.where(several, mean, running_mean.to(wide.dtype))
        variance = torch.where(several, squares / count.clamp(min=1), running_var.to(wide.dtype))
        scale = torch.rsqrt(variance + eps)
        normed = (wide - mean) * scale
        if weight is not None:
            normed = normed * weight
        if bias is not None:
            normed = normed + bias
        ctx.save_for_backward(rows, weight, mean, scale, count)
        ctx.counted, ctx.world = counted, world
        ctx.mark_non_differentiable(mean, variance, count)
        return normed.to(rows.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        rows, weight, mean, scale, count = ctx.saved_tensors
        wide = grad.to(scale.dtype)
        normed = (rows.to(scale.dtype) - mean) * scale
        own = torch.stack([wide.sum(0), (wide * normed).sum(0)])
        of_bias, of_weight = (None, None) if weight is None else (own[0].to(weight.dtype), own[1].to(weight.dtype))
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None, None, None, None
        # The statistics depend on all rows; this process has only the derivatives with respect to its own rows.
        total = own.clone()
        dist.all_reduce(total, group=ctx.world.group)
        change = wide
        if ctx.counted:
            share = torch.where(count > 1, 1 / count.clamp(min=1), 0.0)
            change = wide - share * (total[0] + normed * total[1])
        change = change * scale if weight is None else change * (scale * weight)
        return change.to(rows.dtype), of_weight, of_bias, None, None, None, None, None


def _moments(rows: Tensor) -> Tensor:
    """Return the count, means and sums of squared deviations of the columns as one tensor (1 + 2 c,)."""
    mean = rows.mean(0) if len(rows) else rows.new_zeros(rows.shape[1])
    return torch.cat([rows.new_full((1,), len(rows)), mean, (rows - mean).square().sum(0)])


def _together(own: Tensor, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count (1,), means (c,) and sums of squared deviations (c,) over all processes, bit for bit equal in
    each.
    """
    found = gather_rows(own[None], [1] * world.size, world)
    counts = found[:, :1]
    means, squares = found[:, 1:].tensor_split(2, dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, (squares + counts * (means - mean).square()).sum(0)
