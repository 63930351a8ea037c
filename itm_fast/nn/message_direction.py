"""`MessageDirection`: messages from one side of each pair to the other, their fusion and pooling.

Inside also: `PaddedSide`, `Passed`, `without_bias`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer, narrowed
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.padded_pairs import at_least_a_row
from itm_fast.nn.regulators import RecurrentAggregationRegulator, RecurrentCorrespondenceRegulator
from itm_fast.ops.precision import without_autocast

__all__ = ["MessageDirection", "PaddedSide", "Passed", "without_bias"]


class PaddedSide(NamedTuple):
    """One side of all pairs, padded. The first row of an empty set counts as inside; its pairs score 0."""

    rows: Tensor  # (n, 1, k, d) for images, (1, m, k, d) for captions
    inside: Tensor  # bool (n, 1, k) or (1, m, k)
    lengths: Tensor  # (n, 1) or (1, m)

    @classmethod
    def of(cls, sets: Fragments, dim: int) -> PaddedSide:
        padded, lengths = at_least_a_row(sets)
        inside = torch.arange(padded.shape[1], device=padded.device) < lengths.clamp(min=1)[:, None]
        return cls(*(tensor.unsqueeze(dim) for tensor in (padded, inside, lengths)))


class Passed(NamedTuple):
    """What one side of the pairs became, and how. k queries, c contexts.

    Attributes:
        vector: the pooled queries after fusion (n, m, d).
        attention: (n, m, k, c) for each attention of the queries to the contexts.
        temperatures: (n, m, k) for each attention, the factor of the inner products.
        fused: the queries after fusion (n, m, k, d).
    """

    vector: Tensor
    attention: list[Tensor]
    temperatures: list[Tensor]
    fused: Tensor

    def of_first(self, shares: list[Tensor], n_queries: int, n_contexts: int) -> reference.RegulationSteps:
        """Return the steps of the first pair of these sizes, whose pooling has the weights `shares`."""
        return reference.RegulationSteps(
            [weights[0, 0, :n_queries, :n_contexts] for weights in self.attention],
            [factors[0, 0, :n_queries] for factors in self.temperatures],
            [share[:n_queries] for share in shares],
        )


class MessageDirection(nn.Module):
    """Send messages from contexts to queries, fuse them with the queries, and pool these to one vector.

    For queries `x_j` with attention queries `q_j`, and contexts `z_k` with keys `y_k`, all of width d:

    1. Messages `m_j = sum_k softmax_k(<q_j, y_k> / sqrt(d)) z_k`.
    2. With `message_attention`, `m_j = sum_i softmax_i(<W_1 m_j, W_2 m_i> / sqrt(d)) m_i`.
    3. Fusion `f_j = x_j + relu(W (g_j [x_j; m_j]))` with the gate `g_j = sigmoid(<x_j, m_j>)`; "sum" adds `x_j + m_j`
       instead. With `message_attention`, the messages are l2-normalised here. Without fusion `f_j = m_j`.
    4. `sum_j w_j f_j`, where w is the mean over the heads of `softmax_j(V relu(U f_j + u) + v)`.

    RCR changes step 1: from the second attention on, it uses `lambda_j <e_j * q_j, y_k> / sqrt(d)`. The factors come
    from the alignment `l2norm(W |x_j - l2norm(m_j)|^2 + b)` of the attention before. RAR replaces step 4.

    Args:
        dim: width d.
        message_attention, fusion, heads: as in `MessagePassing`.
        correspondence: RCR, with any number of steps.
        alignment_dim: width of the alignments.
        aggregation: RAR; None: pool with attention.
    """

    def __init__(
        self,
        dim: int,
        *,
        message_attention: bool,
        fusion: str,
        heads: int,
        correspondence: RecurrentCorrespondenceRegulator,
        alignment_dim: int,
        aggregation: RecurrentAggregationRegulator | None,
    ) -> None:
        super().__init__()
        self.scale, self.fusion, self.message_attention = 1 / math.sqrt(dim), fusion, message_attention
        if message_attention:
            self.message_query, self.message_key = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        if fusion != "none":
            make = without_bias if message_attention else linear_layer
            self.fuse = make(2 * dim if fusion == "concat" else dim, dim)
        self.correspondence = correspondence
        steps = len(correspondence.channels)
        self.alignments = nn.ModuleList(linear_layer(dim, alignment_dim) for _ in range(steps))
        self.aggregation = aggregation
        # The published form without fusion averages messages that attend to each other.
        pools = aggregation is None and not (fusion == "none" and message_attention)
        self.pool = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, heads)) if pools else None

    def forward(self, queries: PaddedSide, attending: Tensor, contexts: PaddedSide, keys: Tensor) -> Passed:
        """Pass messages in all pairs. `attending` and `keys` have the shapes of the rows of queries and contexts."""
        attention, temperatures = [], []
        channels, temperature = torch.ones_like(attending), attending.new_ones(*attending.shape[:-1], 1)
        for step in range(len(self.alignments) + 1):
            raw = temperature * self.scale * ((channels * attending) @ keys.transpose(2, 3))
            weights = _softmax(raw, contexts.inside[:, :, None])
            messages = weights.to(contexts.rows.dtype) @ contexts.rows
            attention.append(weights)
            temperatures.append((temperature * self.scale).squeeze(3).expand(weights.shape[:3]))
            if step < len(self.alignments):
                alignments = l2norm(self.alignments[step]((queries.rows - l2norm(messages)).square()))
                channels, temperature = self.correspondence(step, alignments, channels, temperature)
        if self.message_attention:
            raw = self.message_query(messages) @ self.message_key(messages).transpose(2, 3)
            among = _softmax(self.scale * raw, queries.inside[:, :, None])
            messages = among.to(messages.dtype) @ messages
        fused = messages if self.fusion == "none" else self._fused(queries.rows, messages)
        return Passed(self._pooled(queries, fused), attention, temperatures, fused)

    def shares(self, queries: PaddedSide, fused: Tensor) -> list[Tensor]:
        """Return the weights (k,) of the fused queries in the vector of the only pair, for each step of RAR."""
        if self.aggregation is not None:
            return self.aggregation.shares(_pairs(queries, fused))
        return [self._weights(queries, fused)[0, 0]]

    def _fused(self, rows: Tensor, messages: Tensor) -> Tensor:
        if self.message_attention:
            messages = l2norm(messages)
        wide = torch.promote_types(rows.dtype, torch.float32)
        gates = torch.sigmoid((rows * messages).sum(dim=3, keepdim=True, dtype=wide)).to(messages.dtype)
        rows = rows.expand_as(messages)
        both = rows + messages if self.fusion == "sum" else torch.cat([rows, messages], dim=3)
        return torch.relu(self.fuse(gates * both)) + rows

    def _pooled(self, queries: PaddedSide, fused: Tensor) -> Tensor:
        fused = fused.to(torch.promote_types(fused.dtype, torch.float32))
        if self.aggregation is not None:
            rows = narrowed(fused, cast(Tensor, self.aggregation.weight[0].weight))
            return self.aggregation(_pairs(queries, rows)).to(fused.dtype).view(*fused.shape[:2], fused.shape[3])
        # Autocast would round the vectors to 16 bits, and with them the cosines.
        with without_autocast(fused.device.type):
            return (self._weights(queries, fused)[:, :, None].to(fused.dtype) @ fused).squeeze(2)

    def _weights(self, queries: PaddedSide, fused: Tensor) -> Tensor:
        """Return the weights of the fused queries in the vector, (n, m, k). They sum to one."""
        if self.pool is None:
            inside = queries.inside.to(fused.dtype).expand(fused.shape[:3])
            return inside / inside.sum(dim=2, keepdim=True)
        rows = narrowed(fused, cast(Tensor, self.pool[0].weight))
        return _softmax(self.pool(rows).transpose(2, 3), queries.inside[:, :, None]).mean(dim=2)


def without_bias(inputs: int, outputs: int) -> nn.Linear:
    """Create a linear layer without a bias, with a Xavier-uniform weight."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


def _softmax(raw: Tensor, inside: Tensor) -> Tensor:
    """Softmax over the last dimension where `inside`, in at least float32."""
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    return torch.softmax(raw.masked_fill(~inside, -torch.inf), dim=-1)


def _pairs(side: PaddedSide, rows: Tensor) -> Fragments:
    """Return rows (n, m, k, d) of one side as one set for each pair."""
    lengths = side.lengths.expand(rows.shape[:2]).flatten()
    return Fragments.from_padded(rows.flatten(0, 1), lengths)
