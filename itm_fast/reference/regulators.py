"""Cross-attention alignments and regulated scores in plain PyTorch, by the published loop.

`cross_attention_alignments` and `regulated_scores` take one query set and its contexts at a time, or one pair; they are
the truth of the tests. `regulation_steps` shows what happens inside one pair. The formulas, `align`, `correspond`,
`aggregate` and the order in which `regulate` takes them, are written once, for this form and the packed one: the two
differ in how they lay rows out (`Rows`, `Layout`).

All are differentiable and take float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import EPSILON, cross_attention_weights, detach_zero_rows, pair_batches
from itm_fast.reference.philox import CounterDropout
from itm_fast.reference.regulator_parameters import (
    AggregationWeights,
    AlignmentWeights,
    CorrespondenceWeights,
    RegulatorParameters,
)

__all__ = ["RegulationSteps", "cross_attention_alignments", "regulated_scores", "regulation_steps"]

Temperature = float | Tensor


class Rows(Protocol):
    """Where the rows of the pairs lie: `...` are batch dimensions, `rows` all query rows, `sets` the pairs."""

    def mean(self, rows: Tensor) -> Tensor:
        """(..., rows, m) or (..., rows) to the mean over each pair's rows, (..., sets, m) or (..., sets)."""

    def spread(self, sets: Tensor) -> Tensor:
        """(..., sets, m) to (..., rows, m): each row gets what is its pair's."""

    def softmax(self, logits: Tensor) -> Tensor:
        """Softmax of (..., rows) over each pair's rows."""

    def sum(self, rows: Tensor) -> Tensor:
        """(..., rows, m) to the sum over each pair's rows, (..., sets, m)."""

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        """Dropout on (..., sets, m): a mask for each pair, step and channel."""

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        """Dropout on (..., rows, m): a mask for each pair, step, row and channel."""


class Layout(Rows, Protocol):
    """Rows that attend to their contexts."""

    query: Tensor  # (..., rows, d)

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        """Attended vectors (..., rows, d); `channels` (..., rows, d) or (d,), `temperature` (..., rows, 1) or (1,)."""


def unit(vectors: Tensor) -> Tensor:
    """Return `v / (|v| + 1e-8)` over the last dimension. A vector of zeros receives no gradient."""
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / (norm + EPSILON).masked_fill(norm == 0, torch.inf)


def align(query: Tensor, attended: Tensor, weights: AlignmentWeights) -> Tensor:
    """Eq 7, `l2norm(W |q - l2norm(c)|^2 + b)`: (..., d) and (..., d) to (..., m)."""
    return unit(F.linear((query - unit(attended)).square(), weights.weight, weights.bias))


def correspond(
    seen: Tensor, channels: Tensor | None, temperature: Temperature, weights: CorrespondenceWeights, residual: bool
) -> tuple[Tensor, Tensor]:
    """Eq 8, one step of RCR: from `seen` (..., m) and the factors before to those after.

    `channels` (..., d), where None stands for ones, and `temperature` (..., 1).
    """
    change = torch.tanh(F.linear(torch.tanh(F.linear(seen, weights.w1, weights.b1)), weights.w2, weights.b2))
    shift = F.linear(torch.tanh(F.linear(seen, weights.w3, weights.b3)), weights.w4, weights.b4)
    if residual:
        change = change + (1.0 if channels is None else channels)
        shift = shift + temperature
    return change.clamp(-1.0, 1.0), shift.relu()


def aggregate(
    layout: Rows, aligned: Tensor, guidance: Tensor, weights: AggregationWeights, step: int, residual: bool
) -> tuple[Tensor, Tensor]:
    """Eq 15 and 16, one step of RAR: the next guidance (..., sets, m), and the weights of the rows (..., rows)."""
    guide = layout.drop_guidance(torch.tanh(F.linear(guidance, weights.a, weights.alpha)), step)
    local = layout.drop_rows(torch.tanh(F.linear(aligned, weights.b, weights.beta)), step)
    share = layout.softmax(F.linear(layout.spread(guide) * local, weights.v, weights.c).squeeze(-1))
    gathered = layout.sum(share[..., None] * aligned)
    return unit((guidance + gathered) / 2 if residual else gathered), share


def mean_cosine(layout: Layout, attended: Tensor) -> Tensor:
    """Eq 5: the mean over each pair's rows of the cosine with what they attend to, (..., sets)."""
    norms = torch.linalg.vector_norm(layout.query, dim=-1) * torch.linalg.vector_norm(attended, dim=-1)
    return layout.mean((layout.query * attended).sum(dim=-1) / norms.clamp(min=EPSILON))


def alignment_steps(
    layout: Layout, parameters: RegulatorParameters, temperature: float
) -> Iterator[tuple[Tensor, tuple[Tensor | None, Temperature]]]:
    """The alignments (..., rows, m) of each attention, with the factors of the next one."""
    channels: Tensor | None = None
    now: Temperature = temperature
    if parameters.initial_factors is not None:
        channels, now = parameters.initial_factors
    aligned = layout.query  # What RCR sees where nothing is aligned.
    for step in range(max(len(parameters.alignments), len(parameters.correspondences))):
        if step < len(parameters.alignments):
            aligned = align(layout.query, layout.attend(channels, now), parameters.alignments[step])
        if step < len(parameters.correspondences):
            seen = aligned if parameters.correspondence_input == "alignment" else layout.query
            channels, now = correspond(
                seen, channels, now, parameters.correspondences[step], parameters.residual_correspondence
            )
        yield aligned, (channels, now)


def regulate(
    layout: Layout, parameters: RegulatorParameters, temperature: float, shares: list[Tensor] | None = None
) -> Tensor:
    """The scores (..., sets), Algorithm 1 and its variants; the weights of each aggregation are added to `shares`."""
    factors: tuple[Tensor | None, Temperature] = (None, temperature)
    if parameters.initial_factors is not None:
        factors = parameters.initial_factors
    aligned = guidance = torch.empty(0)

    def aggregated(step: int) -> Tensor:
        weights, residual = parameters.aggregations[step], parameters.residual_aggregation
        result, share = aggregate(layout, aligned, guidance, weights, step, residual)
        if shares is not None:
            shares.append(share)
        return result

    for step, (aligned, factors) in enumerate(alignment_steps(layout, parameters, temperature)):  # noqa: B007
        if parameters.interleaved:
            guidance = layout.mean(aligned) if step == 0 else guidance
            guidance = aggregated(step)
    if parameters.score is None:
        return mean_cosine(layout, layout.attend(*factors))
    if not parameters.interleaved:
        guidance = layout.mean(aligned)
        for step in range(len(parameters.aggregations)):
            guidance = aggregated(step)
    if parameters.normalize_mean:
        guidance = unit(guidance)
    activation = torch.sigmoid if parameters.activation == "sigmoid" else torch.tanh
    return activation(F.linear(guidance, parameters.score.u, parameters.score.u0)).squeeze(-1)


class PairRows:
    """`Layout` of B pairs of equal sizes: rows (B, n, ·), one set in each pair (B, 1, ·)."""

    def __init__(
        self,
        query: Tensor,  # (B, n, d)
        context: Tensor,  # (B, k, d)
        normalization: str,
        negative_slope: float,
        focal: str | None,
        dropout: CounterDropout | None = None,
        rows: Tensor | None = None,  # (B, n): numbers of the query rows
        contexts: Tensor | None = None,  # (B,): numbers of the context sets
    ) -> None:
        self.query, self.context = query, context
        self.options = (normalization, negative_slope, focal)
        self.dropout, self.rows, self.contexts = dropout, rows, contexts
        self.attention: list[Tensor] = []
        self.temperatures: list[Tensor] = []

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        reweighted = self.query if channels is None else self.query * channels
        attention = cross_attention_weights(reweighted, self.context, temperature, *self.options)
        self.attention.append(attention)
        self.temperatures.append(torch.as_tensor(temperature).expand(*self.query.shape[:2], 1).squeeze(-1))
        return torch.bmm(attention, self.context)

    def mean(self, rows: Tensor) -> Tensor:
        return rows.mean(dim=1, keepdim=True)

    def spread(self, sets: Tensor) -> Tensor:
        return sets

    def softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=1)

    def sum(self, rows: Tensor) -> Tensor:
        return rows.sum(dim=1, keepdim=True)

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        if self.dropout is None or self.rows is None or self.contexts is None:
            return guidance
        places = (self.rows[:, :1], self.contexts[:, None])
        return guidance * self.dropout.factors(*places, 2 * step + 1, guidance.shape[-1], guidance.dtype)

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        if self.dropout is None or self.rows is None or self.contexts is None:
            return rows
        return rows * self.dropout.factors(self.rows, self.contexts[:, None], 2 * step, rows.shape[-1], rows.dtype)


def regulated_scores(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    temperature: float = 10.0,
    negative_slope: float = 0.1,
    focal: str | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Scores `(len(queries), len(contexts))` by the published loop; with `dropout` the `seed` must be given."""
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    mask = counter_dropout(dropout, seed, queries.device)
    scores = queries.values.new_zeros(len(queries), len(contexts))
    for query, context, i, j in pair_batches(queries, contexts):
        if query.shape[1] == 0 or context.shape[1] == 0:
            continue
        rows = queries.offsets[i, None] + torch.arange(query.shape[1], device=queries.device)
        layout = PairRows(query, context, "clipped_l2norm", negative_slope, focal, mask, rows, j)
        scores = scores.index_put((i, j), regulate(layout, parameters, temperature).squeeze(1))
    return scores


def cross_attention_alignments(
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
) -> Tensor:
    """Alignments `(len(contexts), N_queries, m)` by the published loop."""
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    parameters = alignment_parameters(weight, bias, correspondences, residual_correspondence)
    width = parameters.alignments[0].weight.shape[0]
    result = queries.values.new_zeros(len(contexts), queries.values.shape[0], width)
    for query, context, i, j in pair_batches(queries, contexts):
        layout = PairRows(query, context, normalization, negative_slope, focal)
        *_, (aligned, _) = alignment_steps(layout, parameters, temperature)
        rows = queries.offsets[i, None] + torch.arange(query.shape[1], device=queries.device)
        result = result.index_put((j[:, None].expand_as(rows), rows), aligned)
    return result


def alignment_parameters(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None,
    correspondences: Sequence[CorrespondenceWeights],
    residual_correspondence: bool,
) -> RegulatorParameters:
    """The parameters of a chain that ends in alignments: its score is never asked for."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] if isinstance(bias, Tensor) else list(bias or (part.new_zeros(len(part)) for part in weights))
    width = weights[0].shape[0]
    return RegulatorParameters(
        list(zip(weights, biases, strict=True)),
        correspondences,
        score=(weights[0].new_zeros(1, width), weights[0].new_zeros(1)),
        residual_correspondence=residual_correspondence,
    )


def counter_dropout(probability: float, seed: int | Tensor | None, device: torch.device) -> CounterDropout | None:
    """The dropout of a call; None where nothing is dropped."""
    if probability == 0.0:
        return None
    if seed is None:
        raise ValueError(f"seed: expected one for the dropout of {probability:g}, got None")
    return CounterDropout(probability, seed, device)


class RegulationSteps(NamedTuple):
    """What the regulators do inside one pair, step by step."""

    attention: list[Tensor]  # (n, k) for each attention: how each query attends to the contexts
    temperatures: list[Tensor]  # (n,) for each attention: lambda of each query
    aggregation: list[Tensor]  # (n,) for each aggregation: the weight of each query's alignment


def regulation_steps(
    query: Tensor,
    context: Tensor,
    parameters: RegulatorParameters,
    *,
    temperature: float = 10.0,
    negative_slope: float = 0.1,
    focal: str | None = None,
) -> RegulationSteps:
    """Attention, temperatures and aggregation weights of one pair, `query` (n, d) and `context` (k, d), no dropout."""
    layout = PairRows(query[None], context[None], "clipped_l2norm", negative_slope, focal)
    shares: list[Tensor] = []
    regulate(layout, parameters, temperature, shares)
    return RegulationSteps(
        [attention[0] for attention in layout.attention],
        [row[0] for row in layout.temperatures],
        [share[0] for share in shares],
    )
