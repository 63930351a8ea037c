"""Reference implementation of the cross-attention scores: a loop over captions, and a packed form.

- `cross_attention_scores`: scores one caption at a time with explicit attended vectors, as in SCAN (Lee et al. 2018,
  Eq 1 to 8). Tests and benchmarks compare against it.
- `cross_attention_scores_packed`: scores concatenated captions in bounded memory. It computes the norms of the attended
  vectors from the Gram matrix instead of forming the vectors. It runs where no native kernel is available.

Both are differentiable and support float64. Signatures match `itm_fast.functional.cross_attention_scores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from itm_fast.fragments import Fragments, has_values
from itm_fast.reference.half_precision import float16_in_float32
from itm_fast.reference.norms import norm

CLIPPED = ("clipped_l2norm", "clipped_l1norm", "clipped")
EPSILON = 1e-8
# The Gram form loses precision if |sum_k p_k x_k|^2 is smaller than this fraction of (sum_k p_k |x_k|)^2.
CANCELLATION = 1 / 512

# Elements of one (contexts, queries) block of the packed form: 64 MB in float32.
_BLOCK_ELEMENTS = 1 << 24


@float16_in_float32
def cross_attention_scores(
    queries: Fragments,
    contexts: Fragments,
    *,
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    aggregation: str = "mean",
    logsumexp_temperature: float = 6.0,
) -> Tensor:
    """Compute scores `(len(queries), len(contexts))` with the published loop."""
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    scores = queries.values.new_zeros(len(queries), len(contexts))
    for query, context, i, j in pair_batches(queries, contexts):
        batch = _batch_scores(
            query, context, temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature
        )
        scores = scores.index_put((i, j), batch)
    return scores


def detach_zero_rows(fragments: Fragments) -> Fragments:
    """Return the same rows; rows that are exactly zero receive no gradient.

    A zero row (padding, a blank image) has no direction. Norms and cosines divide by its norm plus `EPSILON`, so its
    derivative would be of the order of `1 / EPSILON` and dominate all others.
    """
    values = fragments.values
    if not (torch.is_grad_enabled() and values.requires_grad):
        return fragments
    is_zero = (values == 0).all(dim=1, keepdim=True)
    return fragments.with_values(torch.where(is_zero, values.detach(), values))


def pair_batches(queries: Fragments, contexts: Fragments) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield all pairs in batches of equal sizes: query (B, n, d), context (B, k, d), and their indices (B,) and (B,).

    If the sets of one side (the images) have equal lengths, that side is one batch and the loop runs over the other
    side. If both sides are ragged, the loop runs over all pairs.
    """
    query_numbers = torch.arange(len(queries), device=queries.device)
    context_numbers = torch.arange(len(contexts), device=contexts.device)
    if len(queries) == 0 or len(contexts) == 0:
        return
    if _is_uniform(contexts):
        batch = contexts.values.reshape(len(contexts), contexts.max_length, contexts.values.shape[1])
        for i in range(len(queries)):
            number = query_numbers[i].expand(len(contexts))
            yield queries[i].expand(len(contexts), -1, -1), batch, number, context_numbers
    elif _is_uniform(queries):
        batch = queries.values.reshape(len(queries), queries.max_length, queries.values.shape[1])
        for j in range(len(contexts)):
            number = context_numbers[j].expand(len(queries))
            yield batch, contexts[j].expand(len(queries), -1, -1), query_numbers, number
    else:
        for i in range(len(queries)):
            for j in range(len(contexts)):
                yield queries[i][None], contexts[j][None], query_numbers[i, None], context_numbers[j, None]


def _is_uniform(fragments: Fragments) -> bool:
    return not fragments.may_have_rest and len(fragments) * fragments.max_length == fragments.values.shape[0]


def _batch_scores(
    query: Tensor,  # (B, n, d)
    context: Tensor,  # (B, k, d)
    temperature: float,
    normalization: str,
    negative_slope: float,
    focal: str | None,
    aggregation: str,
    logsumexp_temperature: float,
) -> Tensor:  # (B,)
    if query.shape[1] == 0 or context.shape[1] == 0:
        return query.new_zeros(query.shape[0])
    attention = cross_attention_weights(query, context, temperature, normalization, negative_slope, focal)
    attended = torch.bmm(attention, context)  # (B, n, d)
    norms = norm(query, 2) * norm(attended, 2)
    cosine = (query * attended).sum(dim=2) / norms.clamp(min=EPSILON)  # (B, n)
    if aggregation == "mean":
        return cosine.mean(dim=1)
    if aggregation == "sum":
        return cosine.sum(dim=1)
    if aggregation == "max":
        return cosine.max(dim=1).values
    return torch.logsumexp(logsumexp_temperature * cosine, dim=1) / logsumexp_temperature


def cross_attention_weights(
    query: Tensor,  # (B, n, d)
    context: Tensor,  # (B, k, d)
    temperature: float | Tensor = 9.0,  # (B, n, 1) if it differs between queries
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
) -> Tensor:  # (B, n, k)
    """Return the attention of each query row over the rows of its context; it sums to 1 (SCAN, Eq 1 to 3)."""
    raw = torch.bmm(context, query.transpose(1, 2))  # (B, k, n)
    if normalization in CLIPPED:
        raw = torch.nn.functional.leaky_relu(raw, negative_slope)
    if normalization in ("l2norm", "clipped_l2norm"):
        raw = raw / (norm(raw, 2, keepdim=True) + EPSILON)
    elif normalization in ("l1norm", "clipped_l1norm"):
        raw = raw / (raw.abs().sum(dim=2, keepdim=True) + EPSILON)
    elif normalization == "softmax":
        raw = torch.softmax(raw, dim=2)
    logits = temperature * raw.transpose(1, 2)  # (B, n, k)
    return hard_attention(logits) if focal == "hard" else _soft_attention(logits, focal, context.shape[1])


def hard_attention(logits: Tensor) -> Tensor:
    """Return one-hot attention to the first maximum of `logits` (..., k), without gradient (CHAN, Pan et al., 2023)."""
    if logits.shape[-1] == 0:
        return logits.detach()
    return torch.zeros_like(logits).scatter_(-1, logits.detach().argmax(-1, keepdim=True), 1.0)


def _soft_attention(logits: Tensor, focal: str | None, count: Tensor | int) -> Tensor:
    """Return the softmax over the last dimension, reassigned as in BFAN; `count` is the number of unpadded contexts."""
    attention = torch.softmax(logits, dim=2)
    return attention if focal is None else reassign_attention(attention, focal, 2, count)


def reassign_attention(attention: Tensor, focal: str, dim: int, count: Tensor | int) -> Tensor:
    """Set the attention to irrelevant contexts to zero along `dim`, as in BFAN (Liu et al. 2019, Eq 5 to 8).

    "equal" keeps a context if its attention times `count`, the number of contexts, exceeds the sum of the attention.
    "prob" weights this comparison with the square roots of the attention. The remaining attention is renormalized. If
    no context is kept, the attention does not change.
    """
    with torch.no_grad():
        if focal == "equal":
            kept = attention * count - attention.sum(dim=dim, keepdim=True) > 0
        else:
            root = attention.sqrt()
            kept = attention * root.sum(dim=dim, keepdim=True) - (attention * root).sum(dim=dim, keepdim=True) > 0
        kept = kept | ~kept.any(dim=dim, keepdim=True)
    focused = attention * kept
    return focused / focused.sum(dim=dim, keepdim=True)


@float16_in_float32
def cross_attention_scores_packed(
    queries: Fragments,
    contexts: Fragments,
    *,
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    aggregation: str = "mean",
    logsumexp_temperature: float = 6.0,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Tensor:
    """Compute scores `(len(queries), len(contexts))` in blocks of about `block_elements` attention weights.

    With several blocks, the backward recomputes the intermediates of each block, which bounds its memory too.
    """
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    options: dict[str, Any] = {
        "max_query_length": queries.max_length,
        "temperature": temperature,
        "normalization": normalization,
        "negative_slope": negative_slope,
        "focal": focal,
        "aggregation": aggregation,
        "logsumexp_temperature": logsumexp_temperature,
    }
    if len(queries) == 0 or len(contexts) == 0:
        return queries.values.new_zeros(len(queries), len(contexts))
    if not torch.compiler.is_compiling():
        queries, contexts = queries.trimmed(), contexts.trimmed()
    context_length, query_length = max(contexts.max_length, 1), max(queries.max_length, 1)
    if len(contexts) * context_length * queries.values.shape[0] <= block_elements:
        return _packed_block(queries.values, queries.offsets, *contexts.to_padded(), **options)
    context_chunk = max(1, int(block_elements**0.5) // context_length)
    query_chunk = max(1, block_elements // (context_chunk * context_length * query_length))
    rows = []
    for query_block in blocks_of(queries, query_chunk):
        columns = []
        for context_block in blocks_of(contexts, context_chunk):
            tensors = (query_block.values, query_block.offsets, *context_block.to_padded())
            if torch.is_grad_enabled() and (queries.values.requires_grad or contexts.values.requires_grad):
                block = checkpoint(_packed_block, *tensors, use_reentrant=False, preserve_rng_state=False, **options)
            else:
                block = _packed_block(*tensors, **options)
            columns.append(block)
        rows.append(torch.cat(columns, dim=1))
    return torch.cat(rows)


def blocks_of(fragments: Fragments, size: int) -> list[Fragments]:
    """Split `fragments` into blocks of `size` consecutive sets."""
    if size >= len(fragments):
        return [fragments]
    bounds = [*range(0, len(fragments), size), len(fragments)]
    offsets = fragments.offsets.tolist()
    return [
        Fragments(fragments.values[offsets[a] : offsets[b]], fragments.offsets[a : b + 1] - offsets[a], check=False)
        for a, b in pairwise(bounds)
    ]


def _packed_block(
    query: Tensor,  # (N, d)
    query_offsets: Tensor,  # (n_queries + 1,)
    context: Tensor,  # (n_contexts, k, d), padded with zeros
    context_lengths: Tensor,  # (n_contexts,)
    *,
    max_query_length: int,
    temperature: float,
    normalization: str,
    negative_slope: float,
    focal: str | None,
    aggregation: str,
    logsumexp_temperature: float,
) -> Tensor:  # (n_queries, n_contexts)
    sets = Fragments(query, query_offsets, check=False, max_length=max_query_length)
    set_index = sets.set_index()
    # Treat an empty context set as one zero vector. Its scores are set to 0 at the end.
    present = torch.arange(context.shape[1], device=context.device) < context_lengths.clamp(min=1)[:, None]

    dots = torch.einsum("nd,ckd->nck", query, context)
    attention = torch.nn.functional.leaky_relu(dots, negative_slope) if normalization in CLIPPED else dots
    attention = normalize_over_queries(attention, normalization, set_index, len(sets))
    logits = (temperature * attention).masked_fill(~present, -torch.inf)
    if focal == "hard":
        attention = hard_attention(logits)
    else:
        attention = _soft_attention(logits, focal, context_lengths.clamp(min=1)[:, None])

    # |sum_k p_k x_k|^2 = p G p with the Gram matrix G of the context set.
    gram = torch.bmm(context, context.transpose(1, 2))
    mixed = torch.bmm(attention.transpose(0, 1), gram).transpose(0, 1)
    squared = (attention * mixed).sum(dim=2)
    dot = (attention * dots).sum(dim=2)
    # Neither torch.compile nor fake and meta tensors support branches that depend on values.
    if has_values(squared):
        squared, dot = _form_where_lost(query, context, attention, gram, squared, dot)
    # The square root has no derivative at 0. Use 0 as the gradient there.
    attended_norm = torch.where(squared > 0, squared, 1.0).sqrt() * (squared > 0)
    norms = torch.linalg.vector_norm(query, dim=1)[:, None] * attended_norm
    cosine = dot / norms.clamp(min=EPSILON)  # (N, n_contexts)
    scores = _aggregate(sets, cosine, aggregation, logsumexp_temperature)
    return scores.masked_fill((sets.lengths == 0)[:, None] | (context_lengths == 0), 0.0)


def _form_where_lost(
    query: Tensor,  # (N, d)
    context: Tensor,  # (n_contexts, k, d)
    attention: Tensor,  # (N, n_contexts, k)
    gram: Tensor,  # (n_contexts, k, k)
    squared: Tensor,  # (N, n_contexts)
    dot: Tensor,  # (N, n_contexts)
) -> tuple[Tensor, Tensor]:
    """Recompute `squared` and `dot` from the attended vectors where the Gram form loses precision.

    The Gram form loses precision if the weighted context vectors cancel each other.
    """
    with torch.no_grad():
        norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        lost = squared < CANCELLATION * (attention * norms).sum(dim=2).square()
    for index in lost.any(dim=0).nonzero().flatten().tolist():
        rows = lost[:, index].nonzero().flatten()
        attended = attention[rows, index] @ context[index]
        place = (rows, torch.full_like(rows, index))
        squared = squared.index_put(place, attended.square().sum(dim=1))
        dot = dot.index_put(place, (query[rows] * attended).sum(dim=1))
    return squared, dot


def normalize_over_queries(raw: Tensor, normalization: str, set_index: Tensor, n_sets: int) -> Tensor:
    """Normalize `raw` `(N, n_contexts, k)` over the rows of each query set."""

    def total(terms: Tensor) -> Tensor:
        return terms.new_zeros(n_sets, *terms.shape[1:]).index_add(0, set_index, terms)

    if normalization in ("l2norm", "clipped_l2norm"):
        squared = total(raw.square())
        norm = torch.where(squared == 0, 1.0, squared).sqrt() * (squared != 0)
        return raw / (norm + EPSILON).index_select(0, set_index)
    if normalization in ("l1norm", "clipped_l1norm"):
        return raw / (total(raw.abs()) + EPSILON).index_select(0, set_index)
    if normalization == "softmax":
        index = set_index[:, None, None].expand_as(raw)
        peak = raw.new_full((n_sets, *raw.shape[1:]), -torch.inf).scatter_reduce(0, index, raw.detach(), "amax")
        numerator = (raw - peak.index_select(0, set_index)).exp()
        return numerator / total(numerator).index_select(0, set_index)
    return raw


def _aggregate(sets: Fragments, cosine: Tensor, aggregation: str, logsumexp_temperature: float) -> Tensor:
    """Aggregate the rows of each set, `(N, n_contexts)` to `(n_sets, n_contexts)`. An empty set gets a finite value."""
    if aggregation in ("mean", "sum"):
        total = sets.with_values(cosine).to_padded()[0].sum(dim=1)
        return total / sets.lengths.clamp(min=1)[:, None] if aggregation == "mean" else total
    scale = logsumexp_temperature if aggregation == "logsumexp" else 1.0
    padded = sets.with_values(scale * cosine).to_padded(-torch.inf)[0]
    padded = padded.masked_fill((sets.lengths == 0)[:, None, None], 0.0)
    if padded.shape[1] == 0:
        return padded.new_zeros(padded.shape[0], padded.shape[2])
    return padded.max(dim=1).values if aggregation == "max" else torch.logsumexp(padded, dim=1) / scale
