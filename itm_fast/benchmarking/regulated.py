"""The workloads of the regulators: text-to-image RCAR with two aggregations and one correspondence step, m = 256.

Inputs are those of `workloads`. There is no dropout, because the baselines would spend most time on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.benchmarking import workloads
from itm_fast.benchmarking.workloads import Sizes, precision_of_products
from itm_fast.functional import RegulatorParameters
from itm_fast.nn import RegulatedSimilarity

__all__ = ["SCORES", "accuracy", "make_regulated_scores", "make_regulated_step", "parameters"]

Score = Callable[[Fragments, Fragments, RegulatorParameters], Tensor]

# One function per way to score. Rows are in bfloat16 if the name ends in "bf16"; so are the weights of the packed form.
SCORES: dict[str, Score] = {
    "loop": reference.regulated_scores,
    "packed": reference.regulated_scores_packed,
    "packed bf16": lambda words, regions, weights: reference.regulated_scores_packed(
        words, regions, weights.to(torch.bfloat16)
    ),
    "native": F_itm.regulated_scores,
    "native high": precision_of_products("high", F_itm.regulated_scores),
    "native medium": precision_of_products("medium", F_itm.regulated_scores),
    "native bf16": F_itm.regulated_scores,
}


def parameters(sizes: Sizes) -> RegulatorParameters:
    """Return the weights, which need a gradient; equal for equal widths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = RegulatedSimilarity(sizes.dim, correspondence_steps=1, aggregation_steps=2)
    return module.to(sizes.device).regulator_parameters()


def _sides(variant: str, sizes: Sizes, small: bool) -> tuple[Fragments, ...]:
    return workloads.in_precision(
        variant, workloads.inputs(workloads.warm_up_sizes(variant, sizes) if small else sizes)
    )


def make_regulated_scores(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient."""
    return workloads.without_gradient(SCORES[variant], *_sides(variant, sizes, small), parameters(sizes))


def make_regulated_step(
    variant: str, sizes: Sizes, mining: str = "hardest", small: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, triplet loss and backward to the gradients of words, regions and every weight."""
    weights = parameters(sizes)

    def score(words: Fragments, regions: Fragments) -> Tensor:
        return SCORES[variant](words, regions, weights)

    return workloads.step_of(variant, score, _sides(variant, sizes, small), weights.tensors(), mining)


def accuracy(variant: str, sizes: Sizes) -> dict[str, float]:
    """Return the accuracy of the scores of a variant against float64, as `workloads.accuracy_of`."""
    weights = parameters(sizes)
    with torch.no_grad():
        words, regions = (side.to(torch.float64) for side in workloads.inputs(sizes))
        exact = reference.regulated_scores_packed(words, regions, weights.to(torch.float64))
    return workloads.accuracy_of(make_regulated_scores(variant, sizes)(), exact)
