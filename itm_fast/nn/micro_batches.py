"""Encode a batch in micro-batches, with the gradients of the whole batch.

Inside: `encode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from itm_fast.ops.gradient_sparse_sets import gradient_sparse_sets
from itm_fast.ops.library import outside_graphs
from itm_fast.ops.replay import Buffers
from itm_fast.ops.sets import Sets
from itm_fast.reference import validation

__all__ = ["encode"]


def encode(module: nn.Module, sides: Mapping[str, tuple[Any, ...]], micro_batch: int | None) -> list[Sets]:
    """Encode both sides of a batch by methods of a module.

    With a micro-batch, `micro_batch` sets are encoded at a time without a graph, and only the embeddings are kept. The
    backward encodes the sets whose embeddings have a non-zero gradient again, this time with a graph. If sets do not
    depend on each other and nothing is random, embeddings and gradients equal those of encoding all sets at once, up to
    rounding. Random numbers (dropout) are drawn for each micro-batch, and the backward draws the same ones. Batch
    normalisation sees one micro-batch at a time and updates its running statistics once for each. Under torch.compile,
    the call breaks the graph.

    Args:
        module: holds the encoders. Each of its parameters with `requires_grad` gets a gradient, zeros if it took no
            part.
        sides: names of methods and the arguments of each: tensors whose first dimension counts the sets, or Fragments.
            The arguments receive no gradient. A method returns Fragments, a tensor with one row per set, or a tuple.
        micro_batch: number of sets to encode at a time; None, or the number of sets: call each method once.

    Raises:
        ValueError: `micro_batch` is not a whole number of at least 1.
    """
    if micro_batch is not None:
        validation.check_count("micro_batch", micro_batch, minimum=1)
    if micro_batch is None or all(len(sets[0]) <= micro_batch for sets in sides.values()):
        return [getattr(module, name)(*sets) for name, sets in sides.items()]
    return _in_parts(module, sides, micro_batch)


@outside_graphs
def _in_parts(module: nn.Module, sides: Mapping[str, tuple[Any, ...]], micro_batch: int) -> list[Sets]:
    parameters = dict(module.named_parameters())
    return gradient_sparse_sets(
        [(partial(_call, _Method(module, name), list(parameters)), sets) for name, sets in sides.items()],
        list(parameters.values()),
        chunk_sets=micro_batch,
        buffers=Buffers(module),
    )


class _Method(nn.Module):
    """Wrap a method of a module as a module, so that its weights can be replaced for a call."""

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
