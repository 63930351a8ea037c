"""The regulators of RCAR as modules for models with a cross-attention similarity.

Inside: `RecurrentCorrespondenceRegulator`, `RecurrentAggregationRegulator`, `CrossAttentionAlignments`.

Every linear layer starts Xavier-uniform with zero bias, as published. Source: Diao et al., "Plug-and-Play
Regulators for Image-Text Matching" (IEEE TIP 2023).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer
from itm_fast.ops.regulators import FOCAL_MODES
from itm_fast.reference import validation
from itm_fast.reference.regulator_parameters import (
    AggregationWeights,
    AlignmentWeights,
    CorrespondenceWeights,
    RegulatorParameters,
)
from itm_fast.reference.regulators import aggregate, correspond
from itm_fast.reference.regulators_packed import PackedRows

__all__ = ["CrossAttentionAlignments", "RecurrentAggregationRegulator", "RecurrentCorrespondenceRegulator"]


class RecurrentCorrespondenceRegulator(nn.Module):
    """RCR: compute the factors of the next attention from alignments. Steps share no weights.

    Args:
        embed_dim: width d of the embeddings.
        alignment_dim: width m of the alignments; the hidden layers have 2m and m/2.
        steps: number of regulations of the attention.
        seen_dim: input width of the layers: m by default, d if the input is the queries.
        residual: add to the factors of the previous step (published), or replace them.
    """

    def __init__(
        self,
        embed_dim: int,
        alignment_dim: int = 256,
        steps: int = 2,
        *,
        seen_dim: int | None = None,
        residual: bool = True,
    ) -> None:
        super().__init__()
        validation.check_count("steps", steps)
        seen_dim = alignment_dim if seen_dim is None else seen_dim
        for name, width in (("embed_dim", embed_dim), ("alignment_dim", alignment_dim), ("seen_dim", seen_dim)):
            validation.check_count(name, width, minimum=1)
        validation.check_flag("residual", residual)
        self.embed_dim, self.seen_dim = embed_dim, seen_dim
        self.residual = residual
        self.channels = nn.ModuleList(_perceptron(seen_dim, 2 * alignment_dim, embed_dim) for _ in range(steps))
        narrow = max(alignment_dim // 2, 1)
        self.temperature = nn.ModuleList(_perceptron(seen_dim, narrow, 1) for _ in range(steps))

    def weights(self) -> list[CorrespondenceWeights]:
        """Return the weights of each step in the form of `RegulatorParameters.correspondences`."""
        return [
            CorrespondenceWeights(*_tensors(channels.children()), *_tensors(temperature.children()))
            for channels, temperature in zip(self.channels, self.temperature, strict=True)
        ]

    def forward(self, step: int, seen: Tensor, channels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step (Eq 8), for hosts with their own attention.

        Args:
            step: number of the step, from 0.
            seen: alignments (..., m), one for each query.
            channels: e of the previous attention, (..., d); ones at first.
            temperature: lambda of the previous attention, (..., 1).

        Returns:
            Channels (..., d) in [-1, 1], factors of the queries, and temperature (..., 1), not negative.

        Raises:
            ValueError: the step does not exist, or `seen` or `channels` has another width.
        """
        count = len(self.channels)
        if step not in range(count):
            raise ValueError(f"step: expected one of {count} steps, from 0, got {step!r}")
        for name, tensor, width in (("seen", seen, self.seen_dim), ("channels", channels, self.embed_dim)):
            _check_width(name, tensor, width)
        return correspond(seen, channels, temperature, self.weights()[step], self.residual)

    def extra_repr(self) -> str:
        return f"steps={len(self.channels)}, residual={self.residual}"


class RecurrentAggregationRegulator(nn.Module):
    """RAR: aggregate the alignments of a pair to one vector; each step refines the weights. Steps share no weights.

    Args:
        alignment_dim: width m of the alignments.
        steps: number of refinements of the weights.
        residual: average with the vector of the previous step; the paper does not.
        dropout: in training, on both hidden layers (published: 0.4).
    """

    def __init__(
        self, alignment_dim: int = 256, steps: int = 2, *, residual: bool = False, dropout: float = 0.4
    ) -> None:
        super().__init__()
        validation.check_count("steps", steps)
        validation.check_count("alignment_dim", alignment_dim, minimum=1)
        validation.check_flag("residual", residual)
        self.alignment_dim, self.residual = alignment_dim, residual
        self.dropout = nn.Dropout(checked_dropout(dropout))
        self.guidance = nn.ModuleList(linear_layer(alignment_dim, alignment_dim) for _ in range(steps))
        self.local = nn.ModuleList(linear_layer(alignment_dim, alignment_dim) for _ in range(steps))
        self.weight = nn.ModuleList(linear_layer(alignment_dim, 1) for _ in range(steps))

    def weights(self) -> list[AggregationWeights]:
        """Return the weights of each step in the form of `RegulatorParameters.aggregations`."""
        steps = zip(self.guidance, self.local, self.weight, strict=True)
        return [AggregationWeights(*_tensors(layers)) for layers in steps]

    def forward(self, alignments: Fragments) -> Tensor:
        """Aggregate alignments (N, m), one set per pair, to one vector per pair, (pairs, m) (Eq 14 to 16).

        Use it in hosts with their own alignments. An empty set gives zeros.

        Raises:
            TypeError: `alignments` is not Fragments.
            ValueError: the width is not `alignment_dim`.
        """
        return self._run(alignments, [])

    def shares(self, alignments: Fragments) -> list[Tensor]:
        """Return the weights (N,) of the alignments in the vector of their pair, for each step. Arguments as above."""
        shares: list[Tensor] = []
        self._run(alignments, shares)
        return shares

    def _run(self, alignments: Fragments, shares: list[Tensor]) -> Tensor:
        """Aggregate, and append the weights of each step to `shares`."""
        validation.check_fragments("alignments", alignments)
        _check_width("alignments", alignments.values, self.alignment_dim)
        rows = _DroppedRows(alignments, self.dropout)
        aligned = alignments.values[None]
        guidance = rows.mean(aligned)
        for step, weights in enumerate(self.weights()):
            guidance, share = aggregate(rows, aligned, guidance, weights, step, self.residual)
            shares.append(share[0])
        return guidance[0]

    def extra_repr(self) -> str:
        return f"steps={len(self.guidance)}, residual={self.residual}"


class _DroppedRows(PackedRows):
    """Rows with the dropout of a module, drawn from torch's generator."""

    def __init__(self, sets: Fragments, dropout: nn.Dropout) -> None:
        super().__init__(sets)
        self.dropout = dropout

    def drop_guidance(self, guidance: Tensor, step: int) -> Tensor:
        return self.dropout(guidance)

    def drop_rows(self, rows: Tensor, step: int) -> Tensor:
        return self.dropout(rows)


class CrossAttentionAlignments(nn.Module):
    """`itm_fast.functional.cross_attention_alignments` with learned weights, and with RCR if `steps` is above 0.

    Use it in a host with its own aggregation of alignments, such as SGRAF.

    Args:
        embed_dim: width d of the embeddings.
        alignment_dim: width m of the alignments.
        steps: steps of RCR before the last attention.
        temperature: inverse temperature of the first attention.
        negative_slope: as in `cross_attention_scores`.
        focal: as in `cross_attention_scores`.
        residual_correspondence: as in `RecurrentCorrespondenceRegulator`.
    """

    def __init__(
        self,
        embed_dim: int,
        alignment_dim: int = 256,
        *,
        steps: int = 0,
        temperature: float = 9.0,
        negative_slope: float = 0.1,
        focal: str | None = None,
        residual_correspondence: bool = True,
    ) -> None:
        super().__init__()
        self.temperature = validation.finite_number("temperature", temperature)
        self.negative_slope = validation.finite_number("negative_slope", negative_slope)
        validation.check_option("focal", focal, FOCAL_MODES)
        self.focal = focal
        self.correspondence = RecurrentCorrespondenceRegulator(
            embed_dim, alignment_dim, steps, residual=residual_correspondence
        )
        self.alignments = nn.ModuleList(linear_layer(embed_dim, alignment_dim) for _ in range(steps + 1))

    def forward(self, queries: Fragments, contexts: Fragments) -> Tensor:
        """Compute alignments `(len(contexts), N_queries, m)`."""
        weights = alignment_weights(self.alignments)
        return F_itm.cross_attention_alignments(
            queries,
            contexts,
            [group.weight for group in weights],
            [group.bias for group in weights],
            temperature=self.temperature,
            negative_slope=self.negative_slope,
            focal=self.focal,
            correspondences=self.correspondence.weights(),
            residual_correspondence=self.correspondence.residual,
        )

    def steps(self, queries: Tensor, contexts: Tensor) -> reference.RegulationSteps:
        """Return what `RegulatedSimilarity.steps` does, without an aggregation."""
        parameters = RegulatorParameters(
            alignment_weights(self.alignments)[:-1],
            self.correspondence.weights(),
            residual_correspondence=self.correspondence.residual,
        )
        return reference.regulation_steps(
            queries,
            contexts,
            parameters,
            temperature=self.temperature,
            negative_slope=self.negative_slope,
            focal=self.focal,
        )

    def weights(self, queries: Tensor, contexts: Tensor) -> Tensor:
        """Return the last attention of one pair: queries `(n, d)` and contexts `(k, d)` to `(n, k)`."""
        return self.steps(queries, contexts).attention[-1]

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, negative_slope={self.negative_slope}, focal={self.focal!r}"


def alignment_weights(layers: nn.ModuleList) -> list[AlignmentWeights]:
    """Return the weights of linear layers in the form of `RegulatorParameters.alignments`."""
    return [AlignmentWeights(*_tensors([layer])) for layer in layers]


def checked_dropout(dropout: object) -> float:
    """Return a dropout probability as a float; raise ValueError if it is not within [0, 1)."""
    probability = validation.finite_number("dropout", dropout, minimum=0.0)
    if probability >= 1.0:
        raise ValueError(f"dropout: expected a probability below 1, got {probability}")
    return probability


def _check_width(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] != width:
        raise ValueError(f"{name}: expected rows of width {width}, got {validation.describe(tensor)}")


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(linear_layer(inputs, hidden), nn.Tanh(), linear_layer(hidden, outputs))


def _tensors(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Return the weight and bias of each linear layer among `layers`, in order."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return [tensor for layer in linear for tensor in (layer.weight, layer.bias)]
