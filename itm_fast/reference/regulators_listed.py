"""Regulated scores of a list of pairs at once, each of which has sizes of its own.

What the backward of `regulated_scores` is made of: the pairs that have a gradient. They are padded to the longest, so
that every step is one operation on all of them, and sums over the rows of a pair have one order on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import EPSILON, reassign_attention
from itm_fast.reference.philox import CounterDropout
from itm_fast.reference.regulator_parameters import RegulatorParameters
from itm_fast.reference.regulators import PairRows, Temperature, regulate

__all__ = ["regulated_scores_listed"]


class _ListedPairs(PairRows):
    """`Layout` of P pairs: rows (P, n, ·), behind those of each pair padding, one set in each pair (P, 1, ·)."""

    def __init__(
        self,
        queries: Fragments,
        contexts: Fragments,
        first_rows: Tensor,  # (P,): numbers of the first query rows
        numbers: Tensor,  # (P,): of the context sets
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
        # An empty set is one zero vector.
        self.lengths, self.counts = lengths.clamp(min=1)[:, None], counts.clamp(min=1)[:, None, None]
        self.is_row = rows < self.lengths  # (P, n)
        self.is_context = torch.arange(context.shape[1], device=query.device) < self.counts  # (P, 1, k)

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        reweighted = self.query if channels is None else self.query * channels
        # Padded queries are zero, and so are their raw scores: they add nothing to the norms.
        raw = leaky_relu(torch.bmm(reweighted, self.context.transpose(1, 2)), self.negative_slope)  # (P, n, k)
        normalized = raw / (torch.linalg.vector_norm(raw, dim=1, keepdim=True) + EPSILON)
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
    """Scores (P,) of the pairs of query set i and context set i.

    `first_rows` and `numbers` (P,): where the first row of a query set, and a context set, stand in the whole call,
    which the dropout is keyed by.
    """
    layout = _ListedPairs(queries, contexts, first_rows, numbers, negative_slope, focal, dropout)
    return regulate(layout, parameters, temperature).squeeze(1).masked_fill(layout.empty, 0.0)
