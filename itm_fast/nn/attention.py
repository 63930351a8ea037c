"""Cross-attention scores as a module that holds the options of one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.ops.cross_attention import check_options

__all__ = ["AttentionScores", "CrossAttentionScores"]


class CrossAttentionScores(nn.Module):
    """`itm_fast.functional.cross_attention_scores` with its options fixed; it has no parameters.

    Text-to-image: call it with words as queries and regions as contexts. Image-to-text: swap them. Queries are the rows
    of the scores.

    Raises:
        TypeError, ValueError: an option is unknown, or a number is not finite.
    """

    def __init__(
        self,
        *,
        temperature: float = 9.0,
        normalization: str = "clipped_l2norm",
        negative_slope: float = 0.1,
        focal: str | None = None,
        aggregation: str = "mean",
        logsumexp_temperature: float = 6.0,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.normalization = normalization
        self.negative_slope = negative_slope
        self.focal = focal
        self.aggregation = aggregation
        self.logsumexp_temperature = logsumexp_temperature
        check_options(**self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `itm_fast.functional.cross_attention_scores`."""
        return {
            "temperature": self.temperature,
            "normalization": self.normalization,
            "negative_slope": self.negative_slope,
            "focal": self.focal,
            "aggregation": self.aggregation,
            "logsumexp_temperature": self.logsumexp_temperature,
        }

    def forward(self, queries: Fragments, contexts: Fragments | F_itm.PreparedContexts) -> Tensor:
        """Scores `(len(queries), len(contexts))`; `contexts` may be the result of `itm_fast.functional.prepare`."""
        return F_itm.cross_attention_scores(queries, contexts, **self.options)

    def weights(self, queries: Tensor, contexts: Tensor) -> Tensor:
        """Compute the attention of one pair, for inspection: queries `(n, d)` and contexts `(k, d)` to `(n, k)`.

        Rows sum to one. The kernels never store these weights, so plain PyTorch computes them.
        """
        return reference.cross_attention_weights(
            queries[None], contexts[None], self.temperature, self.normalization, self.negative_slope, self.focal
        )[0]

    def steps(self, queries: Tensor, contexts: Tensor) -> reference.RegulationSteps:
        """Return what `RegulatedSimilarity.steps` does: one attention with one temperature, and no aggregation."""
        weights = self.weights(queries, contexts)
        return reference.RegulationSteps([weights], [weights.new_full((len(queries),), self.temperature)], [])

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


@dataclass(frozen=True)
class AttentionScores:
    """Scores of images and captions by cross-attention in one direction or both, images as rows.

    Attributes:
        t2i: the scores of words that attend to regions; None without this direction.
        i2t: the scores of regions that attend to words; None without this direction.
        mean: halve the sum of both directions.
    """

    t2i: CrossAttentionScores | None = None
    i2t: CrossAttentionScores | None = None
    mean: bool = False

    @classmethod
    def of(cls, t2i: nn.Module | None, i2t: nn.Module | None, *, mean: bool = False) -> AttentionScores | None:
        """Return the scores of these modules, or None if one of them is not a `CrossAttentionScores`."""
        if not all(one is None or isinstance(one, CrossAttentionScores) for one in (t2i, i2t)):
            return None
        return cls(t2i, i2t, mean)  # type: ignore[arg-type]

    @property
    def modules(self) -> tuple[CrossAttentionScores, ...]:
        """Return the modules of the directions."""
        return tuple(one for one in (self.t2i, self.i2t) if one is not None)

    def with_loss(
        self, images: Fragments, captions: Fragments, *, positives: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the scores, and the scores, as `itm_fast.functional.matching_loss` does.

        `options` are those of the loss.
        """
        first, *others = self.modules
        queries, contexts = (images, captions) if self.t2i is None else (captions, images)
        attention = "i2t" if self.t2i is None else "t2i"
        if others:
            attention = "mean" if self.mean else "sum"
        return F_itm.matching_loss(
            queries,
            contexts,
            attention=attention,
            other_direction=others[0].options if others else None,
            positives=positives,
            **first.options,
            **options,
        )
