"""Reference implementation in plain PyTorch of `itm_fast.functional.matching_loss`: the scores, then their loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.reference.boosting_loss import boosting_loss
from itm_fast.reference.cross_attention import cross_attention_scores
from itm_fast.reference.triplet_loss import triplet_loss

_OF_LOSSES = ("margin", "mining", "positives", "directions", "reduction")
_OF_TRIPLET = (*_OF_LOSSES, "epsilon", "selective_divisor", "halve")
_OF_BOOSTING = (*_OF_LOSSES, "strategy", "alpha", "soft")


def matching_loss(
    queries: Fragments,
    contexts: Fragments,
    *,
    attention: str = "t2i",
    loss: str = "triplet",
    anchor_scores: Tensor | None = None,
    other_direction: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the scores; `options` are those of `cross_attention_scores` and of the losses."""
    chosen, named = (boosting_loss, _OF_BOOSTING) if loss == "boosting" else (triplet_loss, _OF_TRIPLET)
    of_loss = {name: options[name] for name in named if name in options}
    scoring = {name: value for name, value in options.items() if name not in (*_OF_TRIPLET, *_OF_BOOSTING)}
    scores = cross_attention_scores(queries, contexts, **scoring)
    scores = scores if attention == "i2t" else scores.t()
    if attention in ("sum", "mean"):
        scores = scores + cross_attention_scores(contexts, queries, **{**scoring, **(other_direction or {})})
        scores = scores / 2 if attention == "mean" else scores
    anchors = () if anchor_scores is None else (anchor_scores,)
    return chosen(scores, *anchors, **of_loss), scores
