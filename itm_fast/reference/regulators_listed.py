"""Regulated scores of a list of pairs of different sizes, computed in one batch.

The backward of `regulated_scores` uses this module for the pairs with a non-zero gradient. Pairs are padded to the
longest, so that each step is one batched operation and sums over rows have the same order on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import EPSILON, reassign_attention
from itm_fast.reference.norms import norm
from itm_fast.reference.philox import CounterDropout
from itm_fast.reference.regulator_parameters import RegulatorParameters
from itm_fast.reference.regulators import PairRows, Temperature, regulate

__all__ = ["regulated_scores_listed"]


class _ListedPairs(PairRows):
    """`Layout` of P padded pairs: rows are (P, n, ·), and each pair has one set, (P, 1, ·)."""

    def __init__(
        self,
        queries: Fragments,
        contexts: Fragments,
        first_rows: Tensor,  # (P,): indices of the first query rows
        numbers: Tensor,  # (P,): indices of the context sets
        negative_slope: float,
        focal: str | None,
        dropout: CounterDropout | None,
    ) -> None:
        (query, lengths), (context, counts) = queries.to_padded(), contexts.to_padded()
        rows = torch.arange(query.shape[1], device=query.device)
        of_call = first_rows[:, None] + rows
        super().__init__(query, context, "clipped_l2norm", negative_slope, focal, dropout, of_call, numbers)
        self.negative_slope, self.focal = negative_slope, focal
        self.empty = (lengths == 0) | (counts == 0)
        # Treat an empty set as one zero vector.
        self.lengths, self.counts = lengths.clamp(min=1)[:, None], counts.clamp(min=1)[:, None, None]
        self.is_row = rows < self.lengths  # (P, n)
        self.is_context = torch.arange(context.shape[1], device=query.device) < self.counts  # (P, 1, k)

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        reweighted = self.query if channels is None else self.query * channels
        # Padded queries are zero, so their raw scores are zero and do not change the norms.
        raw = leaky_relu(torch.bmm(reweighted, self.context.transpose(1, 2)), self.negative_slope)  # (P, n, k)
        normalized = raw / (norm(raw, 1, keepdim=True) + EPSILON)
        attention = torch.softmax((temperature * normalized).masked_fill(~self.is_context, -torch.inf), dim=2)
        if self.focal is not None:
            attention = reassign_attention(attention, self.focal, 2, self.counts)
        return torch.bmm(attention, self.context)

    def mean(self, rows: Tensor) -> Tensor:
        return self.sum(rows) / (self.lengths if rows.dim() == 2 else self.lengths[..., None])

    def softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.masked_fill(~self.is_row, -torch.inf), dim=1)

    def sum(self, rows: Tensor) -> Tensor:
        padding = ~self.is_row if rows.dim() == 2 else ~self.is_row[..., None]
        return rows.masked_fill(padding, 0.0).sum(dim=1, keepdim=True)


def regulated_scores_listed(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    first_rows: Tensor,
    numbers: Tensor,
    *,
    temperature: float,
    negative_slope: float,
    focal: str | None,
    dropout: CounterDropout | None,
) -> Tensor:
    """Score each query set i against context set i.

    Args:
        queries: P query sets.
        contexts: P context sets.
        parameters: weights of the regulators.
        first_rows: (P,), index of the first row of each query set in the whole call. The dropout mask depends on it.
        numbers: (P,), index of each context set in the whole call. The dropout mask depends on it.
        temperature: initial temperature of the attention.
        negative_slope: slope of the leaky ReLU for negative values.
        focal: reassignment of the attention, or None.
        dropout: the dropout of the call, or None.

    Returns:
        Scores (P,).
    """
    layout = _ListedPairs(queries, contexts, first_rows, numbers, negative_slope, focal, dropout)
    return regulate(layout, parameters, temperature).squeeze(1).masked_fill(layout.empty, 0.0)
