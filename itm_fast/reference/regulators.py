"""Reference implementation of cross-attention alignments and regulated scores with the published loop.

`cross_attention_alignments` and `regulated_scores` loop over query sets or over pairs; tests compare against them.
`regulation_steps` returns the intermediate values of one pair. The loop and the packed form share the formulas `align`,
`correspond`, `aggregate` and `regulate`; they differ in the memory layout of the rows (`Rows`, `Layout`).

All functions are differentiable and support float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.reference.cross_attention import EPSILON, cross_attention_weights, detach_zero_rows, pair_batches
from itm_fast.reference.half_precision import float16_in_float32
from itm_fast.reference.norms import norm
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
    """Memory layout of the rows: `...` are batch dimensions, `rows` the query rows and `sets` the pairs."""

    def mean(self, rows: Tensor) -> Tensor:
        """Average over each pair's rows: (..., rows, m) or (..., rows) to (..., sets, m) or (..., sets)."""

    def spread(self, sets: Tensor) -> Tensor:
        """Copy the value of each pair to its rows: (..., sets, m) to (..., rows, m)."""

    def softmax(self, logits: Tensor) -> Tensor:
        """Apply the softmax over each pair's rows to (..., rows)."""

    def sum(self, rows: Tensor) -> Tensor:
        """Sum over each pair's rows: (..., rows, m) to (..., sets, m)."""

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        """Apply dropout to (..., sets, m), with one mask per pair, step and channel."""

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        """Apply dropout to (..., rows, m), with one mask per pair, step, row and channel."""


class Layout(Rows, Protocol):
    """Layout of rows that attend to their contexts."""

    query: Tensor  # (..., rows, d)

    def attend(self, channels: Tensor | None, temperature: Temperature) -> Tensor:
        """Return attended vectors (..., rows, d).

        Args:
            channels: channel factors of the query (..., rows, d) or (d,), or None for ones.
            temperature: a number, or a tensor (..., rows, 1) or (1,).
        """


def unit(vectors: Tensor) -> Tensor:
    """Return `v / (|v| + 1e-8)` over the last dimension. A zero vector receives no gradient."""
    length = norm(vectors, keepdim=True)
    return vectors / (length + EPSILON).masked_fill(length == 0, torch.inf)


def align(query: Tensor, attended: Tensor, weights: AlignmentWeights, normalize: bool = True) -> Tensor:
    """Compute `l2norm(W |q - l2norm(c)|^2 + b)` (Eq 7): (..., d) and (..., d) to (..., m).

    The inner norm is the authors' code; without `normalize` it is left out, as in the paper.
    """
    attended = unit(attended) if normalize else attended
    return unit(F.linear((query - attended).square(), weights.weight, weights.bias))


def correspond(
    seen: Tensor, channels: Tensor | None, temperature: Temperature, weights: CorrespondenceWeights, residual: bool
) -> tuple[Tensor, Tensor]:
    """Compute one step of RCR (Eq 8).

    Args:
        seen: the alignment (..., m), or the query (..., d).
        channels: channel factors before the step (..., d), or None for ones.
        temperature: temperature before the step (..., 1).
        weights: weights of the step.
        residual: add the change to the previous factors instead of replacing them.

    Returns:
        The channel factors (..., d) and the temperature (..., 1) after the step.
    """
    change = torch.tanh(F.linear(torch.tanh(F.linear(seen, weights.w1, weights.b1)), weights.w2, weights.b2))
    shift = F.linear(torch.tanh(F.linear(seen, weights.w3, weights.b3)), weights.w4, weights.b4)
    if residual:
        change = change + (1.0 if channels is None else channels)
        shift = shift + temperature
    return change.clamp(-1.0, 1.0), shift.relu()


def aggregate(
    layout: Rows,
    aligned: Tensor,
    guidance: Tensor,
    weights: AggregationWeights,
    step: int,
    residual: bool,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute one step of RAR (Eq 15, 16): the next guidance (..., sets, m) and the row weights (..., rows).

    The guidance is l2-normalised as in the authors' code; without `normalize` it is not, as in the paper.
    """
    guide = layout.drop_guidance(torch.tanh(F.linear(guidance, weights.a, weights.alpha)), step)
    local = layout.drop_rows(torch.tanh(F.linear(aligned, weights.b, weights.beta)), step)
    share = layout.softmax(F.linear(layout.spread(guide) * local, weights.v, weights.c).squeeze(-1))
    gathered = layout.sum(share[..., None] * aligned)
    result = (guidance + gathered) / 2 if residual else gathered
    return (unit(result) if normalize else result), share


def mean_cosine(layout: Layout, attended: Tensor) -> Tensor:
    """Return the mean cosine between each pair's rows and their attended vectors (Eq 5), (..., sets)."""
    norms = norm(layout.query) * norm(attended)
    return layout.mean((layout.query * attended).sum(dim=-1) / norms.clamp(min=EPSILON))


def alignment_steps(
    layout: Layout, parameters: RegulatorParameters, temperature: float
) -> Iterator[tuple[Tensor, tuple[Tensor | None, Temperature]]]:
    """Yield the alignments (..., rows, m) of each attention and the factors of the next attention."""
    channels: Tensor | None = None
    now: Temperature = temperature
    if parameters.initial_factors is not None:
        channels, now = parameters.initial_factors
    aligned = layout.query  # Input of RCR if there is no alignment.
    for step in range(max(len(parameters.alignments), len(parameters.correspondences))):
        if step < len(parameters.alignments):
            attended = layout.attend(channels, now)
            aligned = align(layout.query, attended, parameters.alignments[step], parameters.normalize_attended)
        if step < len(parameters.correspondences):
            seen = aligned if parameters.correspondence_input == "alignment" else layout.query
            channels, now = correspond(
                seen, channels, now, parameters.correspondences[step], parameters.residual_correspondence
            )
        yield aligned, (channels, now)


def regulate(
    layout: Layout, parameters: RegulatorParameters, temperature: float, shares: list[Tensor] | None = None
) -> Tensor:
    """Compute the scores (..., sets) with Algorithm 1 or a variant; append the row weights of each step to `shares`."""
    factors: tuple[Tensor | None, Temperature] = (None, temperature)
    if parameters.initial_factors is not None:
        factors = parameters.initial_factors
    aligned = guidance = torch.empty(0)

    def aggregated(step: int) -> Tensor:
        weights, residual = parameters.aggregations[step], parameters.residual_aggregation
        result, share = aggregate(layout, aligned, guidance, weights, step, residual, parameters.normalize_guidance)
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
    """`Layout` of B pairs of equal sizes: rows are (B, n, ·), and each pair has one set, (B, 1, ·)."""

    def __init__(
        self,
        query: Tensor,  # (B, n, d)
        context: Tensor,  # (B, k, d)
        normalization: str,
        negative_slope: float,
        focal: str | None,
        dropout: CounterDropout | None = None,
        rows: Tensor | None = None,  # (B, n): indices of the query rows
        contexts: Tensor | None = None,  # (B,): indices of the context sets
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


@float16_in_float32
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
    """Compute scores `(len(queries), len(contexts))` with the published loop; `dropout` needs a `seed`."""
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


@float16_in_float32
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
    """Compute alignments `(len(contexts), N_queries, m)` with the published loop."""
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
    """Return parameters for computing alignments only. Their score layer is a placeholder and is not used."""
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
    """Return the dropout of a call, or None if the probability is 0."""
    if probability == 0.0:
        return None
    if seed is None:
        raise ValueError(f"seed: expected one for the dropout of {probability:g}, got None")
    return CounterDropout(probability, seed, device)


class RegulationSteps(NamedTuple):
    """Intermediate values of the regulators for one pair."""

    attention: list[Tensor]  # (n, k) for each attention: attention of each query over the contexts
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
    """Return attention, temperatures and aggregation weights of one pair, without dropout.

    Args:
        query: (n, d).
        context: (k, d).
        parameters: weights of the regulators.
        temperature: initial temperature of the attention.
        negative_slope: slope of the leaky ReLU for negative values.
        focal: reassignment of the attention, or None.
    """
    layout = PairRows(query[None], context[None], "clipped_l2norm", negative_slope, focal)
    shares: list[Tensor] = []
    regulate(layout, parameters, temperature, shares)
    return RegulationSteps(
        [attention[0] for attention in layout.attention],
        [row[0] for row in layout.temperatures],
        [share[0] for share in shares],
    )
