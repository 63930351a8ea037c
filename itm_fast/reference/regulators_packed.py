"""Cross-attention alignments and regulated scores of concatenated rows, in bounded memory.

This form runs where no native kernel is available. It scores one block of query sets and context sets at a time. With
several blocks, the backward recomputes the intermediates of each block, which bounds its memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import (
    CLIPPED,
    blocks_of,
    detach_zero_rows,
    normalize_over_queries,
    reassign_attention,
)
from itm_fast.reference.half_precision import float16_in_float32
from itm_fast.reference.philox import CounterDropout
from itm_fast.reference.regulator_parameters import CorrespondenceWeights, RegulatorParameters
from itm_fast.reference.regulators import (
    Temperature,
    alignment_parameters,
    alignment_steps,
    counter_dropout,
    regulate,
)

__all__ = [
    "BLOCK_ELEMENTS",
    "Places",
    "cross_attention_alignments_packed",
    "regulated_scores_block",
    "regulated_scores_packed",
]

# Elements of the widest tensor of a block, one value per context set, query row and channel: 64 MB in float32.
BLOCK_ELEMENTS = 1 << 24


class PackedRows:
    """`Rows` of concatenated sets: rows are (C, N, ·) and sets (C, S, ·)."""

    def __init__(self, sets: Fragments) -> None:
        self.sets, self.set_index = sets, sets.set_index()

    def mean(self, rows: Tensor) -> Tensor:
        lengths = self.sets.lengths.clamp(min=1)
        return self.sum(rows) / (lengths if rows.dim() == 2 else lengths[:, None])

    def spread(self, sets: Tensor) -> Tensor:
        return sets.index_select(1, self.set_index)

    def softmax(self, logits: Tensor) -> Tensor:
        index = self.set_index.expand_as(logits)
        peak = logits.new_full((logits.shape[0], len(self.sets)), -torch.inf)
        peak = peak.scatter_reduce(1, index, logits.detach(), "amax")
        powers = (logits - self.spread(peak)).exp()
        return powers / self.spread(self.sum(powers))

    def sum(self, rows: Tensor) -> Tensor:
        sums = rows.new_zeros(rows.shape[0], len(self.sets), *rows.shape[2:])
        return sums.index_add(1, self.set_index, rows)

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        return guidance

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        return rows


class Places(NamedTuple):
    """Position of a block in the whole call. The dropout mask depends on it."""

    first_rows: Tensor  # (S,): first row of each query set
    rows: Tensor  # (N,): index of each query row
    contexts: Tensor  # (C,): index of each context set


class _Packed(PackedRows):
    """`Layout` of all pairs of a block: C context sets and N query rows in S sets."""

    def __init__(
        self,
        query: Tensor,  # (N, d)
        query_offsets: Tensor,  # (S + 1,)
        context: Tensor,  # (C, k, d), padded with zeros
        context_lengths: Tensor,  # (C,)
        *,
        places: Places,
        normalization: str,
        negative_slope: float,
        focal: str | None,
        dropout: CounterDropout | None = None,
    ) -> None:
        super().__init__(Fragments(query, query_offsets, check=False))
        self.query, self.context = query[None], context
        self.counts = context_lengths.clamp(min=1)[:, None, None]
        # Treat an empty context set as one zero vector.
        self.present = torch.arange(context.shape[1], device=context.device) < self.counts
        self.empty = (self.sets.lengths == 0) | (context_lengths == 0)[:, None]  # (C, S)
        self.normalization, self.negative_slope, self.focal = normalization, negative_slope, focal
        self.dropout, self.places = dropout, places

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        reweighted = self.query if channels is None else self.query * channels
        raw = torch.matmul(reweighted, self.context.transpose(1, 2))  # (C, N, k)
        if self.normalization in CLIPPED:
            raw = torch.nn.functional.leaky_relu(raw, self.negative_slope)
        rows_first = normalize_over_queries(raw.transpose(0, 1), self.normalization, self.set_index, len(self.sets))
        logits = (temperature * rows_first.transpose(0, 1)).masked_fill(~self.present, -torch.inf)
        attention = torch.softmax(logits, dim=2)
        if self.focal is not None:
            attention = reassign_attention(attention, self.focal, 2, self.counts)
        return torch.bmm(attention, self.context)

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        if self.dropout is None:
            return guidance
        places = (self.places.first_rows[None], self.places.contexts[:, None])
        return guidance * self.dropout.factors(*places, 2 * step + 1, guidance.shape[-1], guidance.dtype)

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        if self.dropout is None:
            return rows
        places = (self.places.rows[None], self.places.contexts[:, None])
        return rows * self.dropout.factors(*places, 2 * step, rows.shape[-1], rows.dtype)


@float16_in_float32
def regulated_scores_packed(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    temperature: float = 10.0,
    negative_slope: float = 0.1,
    focal: str | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """Compute scores `(len(queries), len(contexts))` in blocks of about `block_elements` values per tensor."""
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    mask = counter_dropout(dropout, seed, queries.device)

    def scores(layout: _Packed, weights: RegulatorParameters) -> Tensor:
        return _scores(layout, weights, temperature)

    if len(queries) == 0 or len(contexts) == 0:
        return queries.values.new_zeros(len(queries), len(contexts))
    options = {"normalization": "clipped_l2norm", "negative_slope": negative_slope, "focal": focal, "dropout": mask}
    return torch.cat(
        [
            torch.cat(list(columns), dim=1)
            for columns in _in_blocks(scores, queries, contexts, parameters, block_elements, options)
        ]
    )


@float16_in_float32
def cross_attention_alignments_packed(
    queries: Fragments,
    contexts: Fragments,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    correspondences: Sequence[CorrespondenceWeights] = (),
    residual_correspondence: bool = True,
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """Compute alignments `(len(contexts), N_queries, m)` in blocks of about `block_elements` values per tensor."""
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    parameters = alignment_parameters(weight, bias, correspondences, residual_correspondence)

    def alignments(layout: _Packed, weights: RegulatorParameters) -> Tensor:
        *_, (aligned, _) = alignment_steps(layout, weights, temperature)
        return aligned

    if len(queries) == 0 or len(contexts) == 0:
        width = parameters.alignments[0].weight.shape[0]
        return queries.values.new_zeros(len(contexts), queries.values.shape[0], width)
    options = {"normalization": normalization, "negative_slope": negative_slope, "focal": focal}
    return torch.cat(
        [
            torch.cat(list(columns))
            for columns in _in_blocks(alignments, queries, contexts, parameters, block_elements, options)
        ],
        dim=1,
    )


def regulated_scores_block(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    places: Places,
    *,
    temperature: float,
    negative_slope: float,
    focal: str | None,
    dropout: CounterDropout | None,
) -> Tensor:
    """Compute scores `(len(queries), len(contexts))` of one block at position `places` of the whole call."""
    layout = _Packed(
        queries.values,
        queries.offsets,
        *contexts.to_padded(),
        places=places,
        normalization="clipped_l2norm",
        negative_slope=negative_slope,
        focal=focal,
        dropout=dropout,
    )
    return _scores(layout, parameters, temperature)


def _scores(layout: _Packed, parameters: RegulatorParameters, temperature: float) -> Tensor:
    return regulate(layout, parameters, temperature).masked_fill(layout.empty, 0.0).t()


def _consecutive(queries: Fragments, n_contexts: int, first_row: int, first_context: int) -> Places:
    rows = torch.arange(queries.values.shape[0], device=queries.device) + first_row
    contexts = torch.arange(n_contexts, device=queries.device) + first_context
    return Places(queries.offsets[:-1] + first_row, rows, contexts)


def _in_blocks(
    result: Callable[[_Packed, RegulatorParameters], Tensor],
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    block_elements: int,
    options: dict[str, Any],
) -> Iterator[Iterator[Tensor]]:
    """Yield for each block of query sets an iterator over the `result` of each block of context sets."""
    # torch.compile does not support branches that depend on lengths, so compiled code uses one block.
    whole_at_once = torch.compiler.is_compiling()
    if not whole_at_once:
        width = max(queries.values.shape[1], contexts.max_length, *(max(t.shape) for t in parameters.tensors()), 1)
        whole_at_once = len(contexts) * queries.values.shape[0] * width <= block_elements
    if whole_at_once:
        places = _consecutive(queries, len(contexts), 0, 0)
        whole = _Packed(queries.values, queries.offsets, *contexts.to_padded(), places=places, **options)
        yield iter([result(whole, parameters)])
        return
    pairs = max(1, block_elements // width)
    context_chunk = max(1, int(pairs**0.5))
    query_chunk = max(1, pairs // (min(context_chunk, len(contexts)) * max(queries.max_length, 1)))
    weights = parameters.tensors()
    with_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (queries.values, contexts.values, *weights)
    )

    def block(first_row: int, first_context: int, part: Fragments, *tensors: Tensor) -> Tensor:
        places = _consecutive(part, tensors[1].shape[0], first_row, first_context)
        layout = _Packed(tensors[0], part.offsets, *tensors[1:3], places=places, **options)
        return result(layout, parameters.with_tensors(tensors[3:]))

    def columns(first_row: int, part: Fragments) -> Iterator[Tensor]:
        first_context = 0
        for others in blocks_of(contexts, context_chunk):
            arguments: tuple[Any, ...] = (first_row, first_context, part, part.values, *others.to_padded(), *weights)
            if with_gradient:
                yield checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                yield block(*arguments)
            first_context += len(others)

    first_row = 0
    for part in blocks_of(queries, query_chunk):
        yield columns(first_row, part)
        first_row += part.values.shape[0]
