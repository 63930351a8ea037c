"""Gather sets and scores of all processes, with exact gradients, and copy weights to all processes.

Each process holds any number of items of a batch, also zero; `World.counts` gives equal shares. All processes call
these functions in the same order. Rows are sent as bytes, so that every dtype works.

Inside: `gather_sets`, `gather_columns`, `gather_rows`, `sum_of_all`, `none_of`, `copy_from_first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from itm_fast.distributed.world import World
from itm_fast.fragments import Fragments

__all__ = ["copy_from_first", "gather_columns", "gather_rows", "gather_sets", "none_of", "sum_of_all"]

Sets = TypeVar("Sets", Fragments, Tensor, tuple[Any, ...])


def gather_sets(sets: Sets, counts: Sequence[int], world: World) -> Sets:
    """Gather the sets of all processes in the order of the ranks.

    In the backward pass each process sends the gradients of the other processes' sets to their owners, in one
    exchange. It sums the gradients of its own sets in float32 (float64 for float64) in the order of the ranks.

    Args:
        sets: Fragments of `counts[rank]` sets, a tensor `(counts[rank], ...)`, or a tuple of these.
        counts: number of sets of each process.
        world: the processes.

    Returns:
        Fragments of `sum(counts)` sets, a tensor `(sum(counts), ...)`, or a tuple of these.
    """
    if world.size == 1:
        return sets
    if isinstance(sets, tuple):
        return tuple(gather_sets(part, counts, world) for part in sets)
    if isinstance(sets, Tensor):
        return _GatherRows.apply(sets, tuple(counts), world)
    lengths = gather_rows(sets.lengths.to(torch.int64), counts, world)
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    numbers = lengths.tolist()
    ends = [0, *accumulate(counts)]
    rows = tuple(sum(numbers[first:last]) for first, last in pairwise(ends))
    values = _GatherRows.apply(sets.trimmed().values, rows, world)
    return Fragments(values, offsets, check=False, max_length=max(numbers, default=0))


def gather_columns(own: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Gather the columns of all processes side by side.

    All processes must compute the same loss from the result: in the backward pass each uses only the gradient of its
    own columns, without communication.

    Args:
        own: columns of this process, `(n, counts[rank])`.
        counts: number of columns of each process.
        world: the processes.

    Returns:
        `(n, sum(counts))`.
    """
    return own if world.size == 1 else _GatherColumns.apply(own, tuple(counts), world)


def gather_rows(own: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Gather the rows of all processes, without gradient.

    Args:
        own: rows of this process, `(counts[rank], ...)`.
        counts: number of rows of each process.
        world: the processes.

    Returns:
        `(sum(counts), ...)`, in the order of the ranks.
    """
    own = own.detach()
    if world.size == 1:
        return own
    most = max(counts)
    if most == 0 or 0 in own.shape[1:]:
        return own.new_empty(sum(counts), *own.shape[1:])
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    found = own.new_empty(world.size * most, *own.shape[1:])
    dist.all_gather(list(_bytes(found).split(most)), _bytes(padded), group=world.group)
    if min(counts) == most:
        return found
    return torch.cat([part[:count] for part, count in zip(found.split(most), counts, strict=True)])


def sum_of_all(own: Tensor, world: World) -> Tensor:
    """Sum a tensor over all processes.

    All processes must compute the same loss from the sum: in the backward pass each uses its own gradient of the sum.

    Args:
        own: tensor of this process; shape and dtype are the same in all processes.
        world: the processes.
    """
    return own if world.size == 1 else _Sum.apply(own, world)


def none_of(sets: Sets) -> Sets:
    """Return zero sets of the same type, connected to the same autograd graph."""
    if isinstance(sets, tuple):
        return tuple(none_of(part) for part in sets)
    if isinstance(sets, Tensor):
        return sets[:0]
    return Fragments(sets.values[:0], sets.offsets[:1], check=False, max_length=0)


@torch.no_grad()
def copy_from_first(module: nn.Module, world: World) -> None:
    """Copy the parameters and buffers of `module` in process 0 to all processes, in place.

    Raises:
        ValueError: they have other shapes or dtypes in another process.
    """
    if world.size == 1:
        return
    named = list(chain(module.named_parameters(), module.named_buffers()))
    kinds = [(name, tuple(one.shape), str(one.dtype)) for name, one in named]
    found = world.objects(kinds)
    for rank, others in enumerate(found):
        if others != found[0]:
            raise ValueError(
                f"{type(module).__name__}: the weights of process {rank} have other names, shapes or dtypes than those "
                "of process 0"
            )
    for _, one in named:
        sent = one.detach().contiguous()
        if sent.numel():
            dist.broadcast(sent.view(-1).view(torch.uint8), group=world.group, group_src=0)
            one.copy_(sent)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], world: World) -> Tensor:
        ctx.counts, ctx.world = counts, world
        return gather_rows(own, counts, world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, world = ctx.counts, ctx.world
        own, width = counts[world.rank], grad.shape[1:]
        received = grad.new_empty(world.size * own, *width)
        if grad.numel():
            dist.all_to_all_single(
                _bytes(received), _bytes(grad.contiguous()), [own] * world.size, list(counts), group=world.group
            )
        wider = torch.promote_types(grad.dtype, torch.float32)
        return received.view(world.size, own, *width).sum(0, dtype=wider).to(grad.dtype), None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], world: World) -> Tensor:
        first = sum(counts[: world.rank])
        ctx.columns = slice(first, first + counts[world.rank])
        return gather_rows(own.t().contiguous(), counts, world).t().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[:, ctx.columns], None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        total = own.detach().clone()
        dist.all_reduce(total, group=world.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, (n, bytes of a row)."""
    return tensor.view(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
