"""The similarity of RCAR as a module that replaces `CrossAttentionScores`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer
from itm_fast.nn.regulators import (
    RecurrentAggregationRegulator,
    RecurrentCorrespondenceRegulator,
    alignment_weights,
    checked_dropout,
)
from itm_fast.ops.regulators import FOCAL_MODES
from itm_fast.reference import validation
from itm_fast.reference.regulator_parameters import FactorWeights, RegulatorParameters, ScoreWeights

__all__ = ["RegulatedSimilarity"]

FACTORS = ("fixed", "learnable", "query", "alignment")
FORMS = ("code", "paper")


class RegulatedSimilarity(nn.Module):
    """`itm_fast.functional.regulated_scores` with learned weights. Call it like `CrossAttentionScores`.

    Text-to-image: call it with words as queries and regions as contexts. Image-to-text: swap them. Queries are the rows
    of the scores.

    Args:
        embed_dim: width d of the embeddings.
        alignment_dim: width m of the alignments.
        correspondence_steps: steps of RCR. Without RAR, the score is the mean cosine of the last attention.
        aggregation_steps: steps of RAR. With RCR, one more than its steps, unless the schedule is "sequential".
        score_mean: without RAR, score the mean alignment with a learned layer.
        temperature: inverse temperature of the first attention (published: 10 text-to-image, 3 image-to-text).
        negative_slope: as in `cross_attention_scores`.
        focal: as in `cross_attention_scores`.
        dropout: inside RAR, in training.
        schedule: "interleaved": alternate RCR and RAR; "sequential": RAR after the last attention.
        factors: source of the attention factors: "alignment" (published), "query", "learnable" (one pair of factors for
            all) or "fixed". The last two have no RCR, so "fixed" with RAR is RAR alone.
        residual_correspondence: as in the regulators.
        residual_aggregation: as in the regulators.
        activation: of the score, "sigmoid" or "tanh".
        normalize_mean: l2-normalise the mean alignment before scoring it.
        normalize_attended: l2-normalise attended vectors before the alignment. Not in the form "paper".
        form: "code" (authors' code) or "paper". The paper normalises neither attended vectors in Eq 7 nor the output of
            RAR in Eq 16, and has no biases in Eq 7 and 18; these then stay zero.

    Source: Diao et al., "Plug-and-Play Regulators for Image-Text Matching" (IEEE TIP 2023).
    """

    def __init__(
        self,
        embed_dim: int,
        alignment_dim: int = 256,
        *,
        correspondence_steps: int = 1,
        aggregation_steps: int = 2,
        score_mean: bool = False,
        temperature: float = 10.0,
        negative_slope: float = 0.1,
        focal: str | None = None,
        dropout: float = 0.4,
        schedule: str = "interleaved",
        factors: str = "alignment",
        residual_correspondence: bool = True,
        residual_aggregation: bool = False,
        activation: str = "sigmoid",
        normalize_mean: bool = False,
        normalize_attended: bool = True,
        form: str = "code",
    ) -> None:
        super().__init__()
        validation.check_count("correspondence_steps", correspondence_steps)
        validation.check_count("aggregation_steps", aggregation_steps)
        if factors not in FACTORS:
            raise ValueError(f"factors: expected one of {', '.join(map(repr, FACTORS))}, got {factors!r}")
        validation.check_count("embed_dim", embed_dim, minimum=1)
        validation.check_count("alignment_dim", alignment_dim, minimum=1)
        dropout = checked_dropout(dropout)
        temperature = validation.finite_number("temperature", temperature)
        negative_slope = validation.finite_number("negative_slope", negative_slope)
        validation.check_option("focal", focal, FOCAL_MODES)
        validation.check_option("form", form, FORMS)
        interleaved = schedule == "interleaved" and correspondence_steps and aggregation_steps
        if interleaved and aggregation_steps != correspondence_steps + 1:
            raise ValueError(
                f"aggregation_steps: expected {correspondence_steps + 1}, one more than the steps of RCR, as the "
                f"schedule is interleaved, got {aggregation_steps}"
            )
        scored = aggregation_steps > 0 or score_mean
        if factors in ("fixed", "learnable"):
            correspondence_steps = 0
        self.temperature, self.negative_slope, self.focal = temperature, negative_slope, focal
        self.dropout, self.schedule, self.factors = dropout, schedule, factors
        self.activation, self.normalize_mean, self.form = activation, normalize_mean, form
        self.normalize_attended = normalize_attended and form == "code"
        aligned = correspondence_steps + 1 if scored else correspondence_steps * (factors == "alignment")
        self.alignments = nn.ModuleList(linear_layer(embed_dim, alignment_dim) for _ in range(aligned))
        self.correspondence = RecurrentCorrespondenceRegulator(
            embed_dim,
            alignment_dim,
            correspondence_steps,
            seen_dim=embed_dim if factors == "query" else alignment_dim,
            residual=residual_correspondence,
        )
        self.aggregation = RecurrentAggregationRegulator(
            alignment_dim, aggregation_steps, residual=residual_aggregation, dropout=dropout
        )
        self.score = linear_layer(alignment_dim, 1) if scored else None
        if form == "paper":
            for layer in (*self.alignments, *([] if self.score is None else [self.score])):
                layer.bias.requires_grad_(False)
        learnable = factors == "learnable"
        self.initial_channels = nn.Parameter(torch.ones(embed_dim)) if learnable else None
        self.initial_temperature = nn.Parameter(torch.full((1,), float(temperature))) if learnable else None
        self.regulator_parameters()  # Checks the rest: what fits together is known there.

    def regulator_parameters(self) -> RegulatorParameters:
        """Return the weights in the form that `regulated_scores` takes. They are not copied."""
        factors = None
        if self.initial_channels is not None and self.initial_temperature is not None:
            factors = FactorWeights(self.initial_channels, self.initial_temperature)
        return RegulatorParameters(
            alignment_weights(self.alignments),
            self.correspondence.weights(),
            self.aggregation.weights(),
            None if self.score is None else ScoreWeights(self.score.weight, self.score.bias),
            activation=self.activation,
            normalize_mean=self.normalize_mean,
            schedule=self.schedule,
            residual_correspondence=self.correspondence.residual,
            residual_aggregation=self.aggregation.residual,
            correspondence_input="query" if self.factors == "query" else "alignment",
            initial_factors=factors,
            normalize_attended=self.normalize_attended,
            normalize_guidance=self.form == "code",
        )

    def forward(self, queries: Fragments, contexts: Fragments, *, seed: int | Tensor | None = None) -> Tensor:
        """Compute scores `(len(queries), len(contexts))`; `seed` seeds the dropout, None: from torch's random state."""
        return F_itm.regulated_scores(
            queries,
            contexts,
            self.regulator_parameters(),
            temperature=self.temperature,
            negative_slope=self.negative_slope,
            focal=self.focal,
            dropout=self.dropout if self.training and len(self.aggregation.guidance) else 0.0,
            seed=seed,
        )

    def steps(self, queries: Tensor, contexts: Tensor) -> reference.RegulationSteps:
        """Return intermediate results of one pair: queries `(n, d)`, contexts `(k, d)`, without dropout.

        Returns:
            Attention `(n, k)` and temperatures `(n,)` of each attention, and the weights `(n,)` of each aggregation.
        """
        return reference.regulation_steps(
            queries,
            contexts,
            self.regulator_parameters(),
            temperature=self.temperature,
            negative_slope=self.negative_slope,
            focal=self.focal,
        )

    def weights(self, queries: Tensor, contexts: Tensor) -> Tensor:
        """Return the last attention of one pair: queries `(n, d)` and contexts `(k, d)` to `(n, k)`."""
        return self.steps(queries, contexts).attention[-1]

    def extra_repr(self) -> str:
        names = ("temperature", "negative_slope", "focal", "dropout", "schedule", "factors", "activation", "form")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
