"""Encoding a batch a micro-batch at a time, with the gradients of the whole.

Inside: `encode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from itm_fast.nn.regulators import check_steps
from itm_fast.ops.gradient_sparse_sets import gradient_sparse_sets
from itm_fast.ops.replay import Buffers
from itm_fast.ops.sets import Sets

__all__ = ["encode"]


def encode(module: nn.Module, sides: Mapping[str, tuple[Any, ...]], micro_batch: int | None) -> list[Sets]:
    """What encoders of a module make of both sides of a batch.

    With a micro-batch, so many sets of a side are encoded at a time, without a graph, and all that is kept are the
    embeddings; the backward encodes again, as many at a time and with gradient, the sets whose embeddings have one
    that is not zero. Embeddings and gradients are those of encoding all at once, but for rounding, where sets do not
    depend on each other and nothing is drawn. Random numbers (dropout) are drawn micro-batch by micro-batch, the same
    ones again in the backward; batch normalisation sees a micro-batch, and its running statistics follow each of them,
    once. Under torch.compile the call stands outside of the graph.

    Args:
        module: holds the encoders; all of its parameters that need a gradient get one, zeros where none of them took
            part.
        sides: the names of methods, and what each is called with: tensors whose first dimension counts the sets, and
            Fragments; they receive no gradient. The methods give Fragments, tensors of one row per set, or tuples.
        micro_batch: sets that are encoded at a time; None, or as many as there are: each method is called once.

    Raises:
        ValueError: `micro_batch` is no whole number of at least 1.
    """
    if micro_batch is not None:
        check_steps("micro_batch", micro_batch, minimum=1)
    if micro_batch is None or all(len(sets[0]) <= micro_batch for sets in sides.values()):
        return [getattr(module, name)(*sets) for name, sets in sides.items()]
    return _in_parts(module, sides, micro_batch)


@torch.compiler.disable
def _in_parts(module: nn.Module, sides: Mapping[str, tuple[Any, ...]], micro_batch: int) -> list[Sets]:
    parameters = dict(module.named_parameters())
    return gradient_sparse_sets(
        [(partial(_call, _Method(module, name), list(parameters)), sets) for name, sets in sides.items()],
        list(parameters.values()),
        chunk_sets=micro_batch,
        buffers=Buffers(module),
    )


class _Method(nn.Module):
    """A method of a module as a module of its own, whose weights can be replaced for a call."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self, *sets: Any) -> Sets:
        return getattr(self.module, self.name)(*sets)


def _call(
    method: _Method, names: Sequence[str], weights: Sequence[Tensor], buffers: Mapping[str, Tensor] | None, sets: Sets
) -> Sets:
    replaced = dict(zip(names, weights, strict=True)) | {name: kept.clone() for name, kept in (buffers or {}).items()}
    return functional_call(method, {f"module.{name}": tensor for name, tensor in replaced.items()}, sets)
