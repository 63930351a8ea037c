"""Evaluate given scores by a named protocol.

Inside: `Scored`, `score_protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from itm_fast.evaluation.array_likes import ArrayLike, as_integers
from itm_fast.evaluation.measures import Measures, recall_measures
from itm_fast.evaluation.ranking import Ranking, rank_folds, summarize
from itm_fast.evaluation.score_sources import ScoreSource
from itm_fast.evaluation.standards import PROTOCOLS, folds_of
from itm_fast.evaluation.suspicion import Look

__all__ = ["Scored", "score_protocol"]


@attrs.frozen(eq=False)
class Scored:
    """The result of a protocol.

    Attributes:
        name: the protocol.
        summary: measures by name, in percent except for ranks and `mean_distance`.
        measures: those that can be resampled.
        rankings: the ranking of each fold; empty for protocols with their own positives.
    """

    name: str
    summary: dict[str, float]
    measures: Measures
    rankings: Sequence[Ranking] = ()


def score_protocol(
    name: str,
    source: ScoreSource,
    caption_image: ArrayLike,
    *,
    folds: int | None = None,
    first_images: int | None = None,
    ties: str = "pessimistic",
    top: int = 0,
    look: Look | None = None,
    progress: bool = False,
) -> Scored:
    """Evaluate scores by a protocol whose positives are the captions of each image.

    Args:
        name: one of the protocols without `truth` in `PROTOCOLS`.
        source: the scores.
        caption_image: index of the image of each caption, integers `(n_captions,)`: a tensor, an array or a list.
        folds: number of folds in place of the protocol's.
        first_images: use only that many images; None: all.
        ties: as in `itm_fast.functional.retrieval_ranks`.
        top: number of best matches to keep for each query.
        look: collects what is suspicious about the scores.
        progress: show a progress bar if stderr is a terminal.

    Raises:
        TypeError: `caption_image` does not hold integers.
        ValueError: as in `rank_folds`, the protocol has other folds or its own positives, or `ties` is unknown.
    """
    n_folds = folds_of(name, folds)
    if PROTOCOLS[name].truth:
        raise ValueError(f"protocol {name}: its positives are in files; use evaluation.score_truth.score_truth")
    owners = as_integers("caption_image", caption_image)
    rankings = rank_folds(
        source,
        owners,
        folds=n_folds,
        first_images=first_images,
        ties=ties,
        top=top,
        look=look,
        progress=progress,
        description=name,
    )
    ranks = [fold.fold_ranks for fold in rankings]
    return Scored(name, summarize(rankings), recall_measures(ranks, owners, source.n_images), rankings)
