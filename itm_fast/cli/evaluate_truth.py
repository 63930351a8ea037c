"""`itm-fast evaluate --protocol` with positives in files.

Inside: `evaluate_truth`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from itm_fast.cli.score_options import TruthOptions
from itm_fast.cli.score_run import score_by_truth, truth_ids

if TYPE_CHECKING:
    from itm_fast.distributed import World
    from itm_fast.evaluation.score_protocols import Scored
    from itm_fast.evaluation.score_sources import MatrixScores
    from itm_fast.evaluation.scoring import Gallery, Scorer

__all__ = ["evaluate_truth"]


def evaluate_truth(
    members: Sequence[tuple[Scorer, Gallery]],
    protocol: str,
    truth: TruthOptions,
    folds: int,
    world: World,
    name: str,
    *,
    streaming: bool = False,
    seed: int = 0,
) -> Scored | None:
    """Evaluate the mean score of models; return None in all processes but the first.

    Args:
        members: each model with its data set.
        protocol: eccv, cxc or pmrp.
        truth: the files.
        folds: number of folds.
        world: the processes that share the scoring; the first reads the files.
        name: label of the progress bar.
        streaming: keep the scores in a temporary file, not in memory.
        seed: seed of the samples that cxc draws.
    """
    from itm_fast.evaluation.stored_scores import scores_on_disk

    dataset = members[0][1]
    with world.together():
        if world.first:  # Name a wrong file before the pairs are scored.
            truth_ids(truth, dataset.n_images, len(dataset))
    options: dict[str, Any] = {"progress": world.first, "description": name, "world": world}
    opened: contextlib.AbstractContextManager[MatrixScores | None] = (
        scores_on_disk(members, **options) if streaming else contextlib.nullcontext(_in_memory(members, options))
    )
    with opened as source:
        if source is None or not world.first:
            return None
        return score_by_truth([protocol], source, dataset.caption_image, truth, folds=folds, seed=seed)[protocol]


def _in_memory(members: Sequence[tuple[Scorer, Gallery]], options: dict[str, Any]) -> MatrixScores:
    from itm_fast.evaluation import score_matrix
    from itm_fast.evaluation.score_sources import MatrixScores

    scores = score_matrix(*members[0], **options)
    for member in members[1:]:
        scores = scores + score_matrix(*member, **options)
    return MatrixScores(scores)
