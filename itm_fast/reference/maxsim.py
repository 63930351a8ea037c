"""Reference implementation of the MaxSim scores: a loop over pairs, and a packed form.

- `maxsim_scores`: scores one pair at a time. Tests compare against it.
- `maxsim_scores_packed`: pads the context sets and scores blocks of pairs in bounded memory. It runs where no native
  kernel is available.

Both are differentiable and support float64. Signatures match `itm_fast.functional.maxsim_scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import EPSILON, detach_zero_rows
from itm_fast.reference.half_precision import float16_in_float32

# Elements of one block of inner products: 64 MB in float32.
_BLOCK_ELEMENTS = 1 << 24


def comparable_rows(fragments: Fragments, similarity: str) -> Fragments:
    """Return the rows for inner products: normalised for "cosine". Zero rows receive no gradient."""
    fragments = detach_zero_rows(fragments)
    if similarity == "dot":
        return fragments
    squared = fragments.values.square().sum(dim=1, keepdim=True)
    norm = torch.where(squared > 0, squared, 1.0).sqrt() * (squared > 0)
    return fragments.with_values(fragments.values / (norm + EPSILON))


@float16_in_float32
def maxsim_scores(
    queries: Fragments,
    contexts: Fragments,
    *,
    pairs: Tensor | None = None,
    similarity: str = "dot",
    reduction: str = "sum",
    direction: str = "queries",
) -> Tensor:
    """Compute scores `(len(queries), len(contexts))`, or `(P,)` with `pairs`, in a loop over pairs."""
    queries, contexts = comparable_rows(queries, similarity), comparable_rows(contexts, similarity)
    shape = [len(queries), len(contexts)] if pairs is None else [len(pairs)]
    if pairs is None:
        pairs = torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])).reshape(-1, 2)
    scores = [_score(queries[i], contexts[j], reduction, direction) for i, j in pairs.tolist()]
    return torch.stack(scores).reshape(shape) if scores else queries.values.new_zeros(shape)


def _score(query: Tensor, context: Tensor, reduction: str, direction: str) -> Tensor:
    if len(query) == 0 or len(context) == 0:
        return query.new_zeros(())
    products = query @ context.t()
    parts = []
    if direction != "contexts":
        parts.append(products.max(dim=1).values)
    if direction != "queries":
        parts.append(products.max(dim=0).values)
    return torch.stack([part.sum() if reduction == "sum" else part.mean() for part in parts]).sum()


@float16_in_float32
def maxsim_scores_packed(
    queries: Fragments,
    contexts: Fragments,
    *,
    pairs: Tensor | None = None,
    similarity: str = "dot",
    reduction: str = "sum",
    direction: str = "queries",
    block_elements: int = _BLOCK_ELEMENTS,
) -> Tensor:
    """Compute the same scores in blocks of about `block_elements` inner products.

    The backward recomputes the inner products of each block, which bounds its memory too.
    """
    queries, contexts = comparable_rows(queries, similarity), comparable_rows(contexts, similarity)
    shape = [len(queries), len(contexts)] if pairs is None else [pairs.shape[0]]
    if 0 in shape or queries.max_length == 0 or contexts.max_length == 0:
        return queries.values.new_zeros(shape)
    query, query_lengths = queries.to_padded()
    context, context_lengths = contexts.to_padded()
    if pairs is None:
        numbers = torch.arange(shape[0] * shape[1], device=query.device)
        pairs = torch.stack([numbers // shape[1], numbers % shape[1]], dim=1)
    pairs = pairs.to(torch.int64)

    def block(chosen: Tensor, query: Tensor, context: Tensor) -> Tensor:
        i, j = chosen.unbind(1)
        return _padded_scores(query[i], query_lengths[i], context[j], context_lengths[j], reduction, direction)

    per_pair = max(query.shape[1] * context.shape[1], (query.shape[1] + context.shape[1]) * query.shape[2], 1)
    blocks = [
        checkpoint(block, chosen, query, context, use_reentrant=False, preserve_rng_state=False)
        for chosen in pairs.split(max(1, block_elements // per_pair))
    ]
    return torch.cat(blocks).reshape(shape)


def _padded_scores(
    query: Tensor,  # (B, n, d)
    query_lengths: Tensor,  # (B,)
    context: Tensor,  # (B, k, d)
    context_lengths: Tensor,  # (B,)
    reduction: str,
    direction: str,
) -> Tensor:  # (B,)
    products = torch.bmm(query, context.transpose(1, 2))
    query_rows = torch.arange(query.shape[1], device=query.device) < query_lengths[:, None]
    context_rows = torch.arange(context.shape[1], device=query.device) < context_lengths[:, None]
    present = (query_lengths > 0) & (context_lengths > 0)
    total = query.new_zeros(query.shape[0])
    # An absent set has one row here, so that no maximum is -inf; its pairs are set to 0 at the end.
    for dim, own, other, lengths in (
        (2, query_rows, context_rows, query_lengths),
        (1, context_rows, query_rows, context_lengths),
    ):
        if direction != ("contexts", "queries")[2 - dim]:
            hidden = ~(other | ~present[:, None])
            best = products.masked_fill(hidden.unsqueeze(3 - dim), -torch.inf).max(dim=dim).values
            best = torch.where(own & present[:, None], best, 0.0).sum(dim=1)
            total = total + (best if reduction == "sum" else best / lengths.clamp(min=1))
    return total
