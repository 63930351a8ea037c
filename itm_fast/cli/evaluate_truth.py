"""`itm-fast evaluate --protocol` with positives in files.

Inside: `evaluate_truth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from itm_fast.cli.score_options import TruthOptions
from itm_fast.cli.score_run import score_by_truth

if TYPE_CHECKING:
    from itm_fast.distributed import World
    from itm_fast.evaluation.score_protocols import Scored
    from itm_fast.evaluation.scoring import Gallery, Scorer

__all__ = ["evaluate_truth"]


def evaluate_truth(
    members: Sequence[tuple[Scorer, Gallery]], protocol: str, truth: TruthOptions, folds: int, world: World, name: str
) -> Scored | None:
    """Evaluate the mean score of models; return None in all processes but the first.

    Args:
        members: each model with its data set.
        protocol: eccv, cxc or pmrp.
        truth: the files.
        folds: number of folds.
        world: the processes that share the scoring; the first reads the files.
        name: label of the progress bar.
    """
    import torch

    from itm_fast.evaluation import score_matrix
    from itm_fast.evaluation.score_sources import MatrixScores

    scores: torch.Tensor | None = None
    for model, dataset in members:
        found = score_matrix(model, dataset, progress=world.first, description=name, world=world)
        scores = found if scores is None else scores + found
    if scores is None or not world.first:
        return None
    source = MatrixScores(scores)
    return score_by_truth([protocol], source, members[0][1].caption_image, truth, folds=folds)[protocol]
