"""Gradient sparsity of encoders: encode sets without a graph, and differentiate only those that the loss needs.

A loss over hard negatives has a non-zero gradient for only a few sets. The forward encodes all sets in chunks without a
graph and stores only the result. The backward re-encodes the sets with a non-zero gradient in chunks, with a graph. The
other sets would contribute exactly 0. A batch then needs memory for its embeddings and for the graph of one chunk.
`ops.gradient_sparse` does the same for pairs.

A chunk that drew random numbers or changed a buffer (running statistics) is re-encoded as a whole, from its original
random state and buffers: batch normalization sees the whole chunk. Only the forward has side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.precision import autocast_state
from itm_fast.ops.replay import as_it_was, drew, random_state
from itm_fast.ops.sets import Sets, Side, form_of, leaves_of, rows_of, side_of, values_of

__all__ = ["Encode", "gradient_sparse_sets"]

# (weights, buffers, sets) -> the same number of encoded sets: Fragments, tensors with one row per set, or tuples, lists
# and dicts of these. In the forward, buffers is None, and the encoder may change those of its module. In the backward,
# the encoder must use the given buffers and must not change those of its module.
Encode = Callable[[Sequence[Tensor], Mapping[str, Tensor] | None, Sets], Sets]


def gradient_sparse_sets(
    sides: Sequence[tuple[Encode, Sets]],
    weights: Sequence[Tensor],
    *,
    chunk_sets: int | None = None,
    buffers: Callable[[], Mapping[str, Tensor]] = dict,
) -> list[Sets]:
    """Encode the sets of each side. Only `weights` receive gradients; unused weights receive zeros.

    Args:
        sides: pairs of an encoder and its sets. The sets receive no gradient.
        weights: tensors on which the encoders depend, in addition to the sets.
        chunk_sets: number of sets to encode at a time. None: all.
        buffers: returns the buffers that the encoders may change, by name. An unchanged buffer must be the same tensor
            in each call.

    Returns:
        The output of the encoder of each side, with its dtypes.
    """
    forms = [side_of("sets", sets) for _, sets in sides]
    inputs = [tensor for _, tensors in forms for tensor in tensors]
    refuse_transforms("gradient_sparse_sets", *weights, *inputs)
    differentiated = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    pairs = zip(sides, forms, strict=True)
    plan = _Plan(
        [_Encoder(encode, form, len(tensors)) for (encode, _), (form, tensors) in pairs],
        len(weights),
        chunk_sets,
        buffers,
        differentiated,
    )
    values = iter(_GradientSparseSets.apply(plan, *weights, *inputs))
    return [encoder.results().joined([next(values) for _ in encoder.results().parts]) for encoder in plan.encoders]


@dataclass(frozen=True)
class _Chunk:
    numbers: range
    buffers: Mapping[str, Tensor]  # before the chunk was encoded
    random: tuple[Tensor, ...] | None  # generator states before the chunk, if it drew random numbers
    whole: bool  # the sets depend on each other, or share a random stream


@dataclass(frozen=True)
class _Part:
    """Sets that the backward re-encodes together."""

    numbers: Tensor
    buffers: Mapping[str, Tensor]
    random: tuple[Tensor, ...] | None


@dataclass
class _Encoder:
    """One side: its encoder, the structure of its sets and, once encoded, its chunks and the result structure."""

    encode: Encode
    sets: Side
    n_tensors: int
    chunks: list[_Chunk] = field(default_factory=list)
    result: Side | None = None

    def results(self) -> Side:
        assert self.result is not None
        return self.result

    def again(self, hit: Tensor, chunk_sets: int) -> Iterator[_Part]:
        """Yield the sets to re-encode; `hit` (n_sets,) bool marks the sets with a gradient."""
        # Merge independent sets into full chunks if they used the same buffers.
        alone: list[tuple[Mapping[str, Tensor], list[Tensor]]] = []
        for chunk in self.chunks:
            found = hit[chunk.numbers.start : chunk.numbers.stop].nonzero()[:, 0] + chunk.numbers.start
            if len(found) == 0:
                continue
            if chunk.whole:
                yield _Part(_numbers(chunk.numbers, hit.device), chunk.buffers, chunk.random)
            elif alone and not _differ(alone[-1][0], chunk.buffers):
                alone[-1][1].append(found)
            else:
                alone.append((chunk.buffers, [found]))
        for buffers, numbers in alone:
            for part in torch.cat(numbers).split(chunk_sets):
                yield _Part(part, buffers, None)

    def hit(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return a mask (n_sets,) of the sets with a gradient in any result, or None if no result has a gradient."""
        found: Tensor | None = None
        for form, grad in zip(self.results().parts, grads, strict=True):
            if grad is None:
                continue
            # NaN != 0, so NaN counts as a gradient.
            rows = grad != 0
            rows = rows.flatten(1).any(dim=1) if rows.dim() > 1 else rows
            if form is not None:
                every = torch.zeros(self.sets.count, dtype=torch.bool, device=rows.device)
                rows = every.index_fill(0, form.set_index()[rows], True)
            found = rows if found is None else found | rows
        return found


@dataclass(frozen=True)
class _Plan:
    encoders: list[_Encoder]
    n_weights: int
    chunk_sets: int | None
    buffers: Callable[[], Mapping[str, Tensor]]
    differentiated: bool

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Sequence[Tensor]]]:
        """Split the tensors into the weights and the tensors of each side."""
        sides, start = [], self.n_weights
        for encoder in self.encoders:
            sides.append(tensors[start : start + encoder.n_tensors])
            start += encoder.n_tensors
        return tensors[: self.n_weights], sides


class _GradientSparseSets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.autocast = plan, autocast_state(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        weights, sides = plan.split(tensors)
        # Without this, autocast would cache casts of the weights that have no graph for the rest of the step.
        weights = [weight.detach() for weight in weights]
        return tuple(
            value
            for encoder, inputs in zip(plan.encoders, sides, strict=True)
            for value in _encoded(plan, encoder, weights, inputs)
        )

    @staticmethod
    @first_order("gradient_sparse_sets")
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, (weights, sides), remaining = ctx.plan, ctx.plan.split(saved), iter(grads)
        needed = ctx.needs_input_grad[1 : 1 + len(weights)]
        sums: list[Tensor | None] = [None] * len(weights)
        for encoder, inputs in zip(plan.encoders, sides, strict=True):
            own = [next(remaining) for _ in encoder.results().parts]
            hit = encoder.hit(own)
            if hit is None:
                continue
            for part in encoder.again(hit, plan.chunk_sets or encoder.sets.count):
                leaves = [
                    weight.detach().requires_grad_(wanted) for weight, wanted in zip(weights, needed, strict=True)
                ]
                with torch.enable_grad(), as_it_was(ctx.autocast, part.random, hit.device):
                    found = encoder.encode(leaves, part.buffers, encoder.sets.select(part.numbers, inputs, True)[0])
                _add(sums, leaves, found, own, encoder.results(), part.numbers)
        totals = [
            None if not wanted else torch.zeros_like(weight) if total is None else total.to(weight.dtype)
            for weight, total, wanted in zip(weights, sums, needed, strict=True)
        ]
        return (None, *totals, *[None] * sum(map(len, sides)))


def _encoded(plan: _Plan, encoder: _Encoder, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Encode all sets of a side and return the values; store its chunks and the structure of the result."""
    count, device = encoder.sets.count, inputs[0].device
    step = max(plan.chunk_sets or count, 1)
    chunks, spec = [], None
    before = plan.buffers() if plan.differentiated else {}
    for start in range(0, max(count, 1), step):
        numbers = range(start, min(start + step, count))
        random = random_state(device) if plan.differentiated else ()
        found = encoder.encode(weights, None, encoder.sets.select(_numbers(numbers, device), inputs, True)[0])
        leaves, spec = leaves_of(found)
        chunks.append(leaves)
        if plan.differentiated:
            after = plan.buffers()
            replayed, changed = drew(random, device), _differ(before, after)
            encoder.chunks.append(_Chunk(numbers, before, random if replayed else None, replayed or changed))
            before = after
    joined = [_joined(parts) for parts in zip(*chunks, strict=True)]
    encoder.result = Side(count, [form_of(leaf) for leaf in joined], spec)
    return [values_of(leaf) for leaf in joined]


def _joined(parts: Sequence[Fragments | Tensor]) -> Fragments | Tensor:
    """Concatenate the sets of all chunks."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat([values_of(part) for part in parts])
    return Fragments.cat(part for part in parts if isinstance(part, Fragments))


def _add(
    sums: list[Tensor | None],
    leaves: Sequence[Tensor],
    found: Sets,
    grads: Sequence[Tensor | None],
    form: Side,
    numbers: Tensor,
) -> None:
    """Add the contribution of the sets `numbers`, re-encoded as `found`, to the gradients of the weights."""
    outputs, outer = [], []
    for leaf, grad, part in zip(leaves_of(found)[0], grads, form.parts, strict=True):
        values = values_of(leaf)
        if grad is not None and values.requires_grad:
            outputs.append(values)
            own = grad if len(numbers) == form.count else grad[rows_of(part, numbers)]
            outer.append(own.to(values.dtype))
    if not outputs:
        return
    learning = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
    gradients = torch.autograd.grad(outputs, [leaves[place] for place in learning], outer, allow_unused=True)
    for place, gradient in zip(learning, gradients, strict=True):
        if gradient is not None:
            # Accumulate in float32 or higher, and out of place: two weights may share one gradient tensor.
            wide, total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)), sums[place]
            sums[place] = wide if total is None else total + wide


def _differ(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Return whether a buffer changed between two snapshots."""
    return any(before.get(name) is not buffer for name, buffer in after.items())


def _numbers(numbers: range, device: torch.device) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=device)
