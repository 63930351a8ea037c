"""Workloads of the regulators: text-to-image RCAR with two aggregations and one correspondence step, width 256.

The inputs are those of `workloads`. Dropout is off, because the baselines would mostly measure random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.benchmarking.workloads import Sizes, accuracy_of, inputs, precision_of_products, warm_up_sizes
from itm_fast.functional import RegulatorParameters
from itm_fast.nn import RegulatedSimilarity

__all__ = ["SCORES", "accuracy", "make_regulated_scores", "make_regulated_step", "parameters"]

Score = Callable[[Fragments, Fragments, RegulatorParameters], Tensor]

# One function per way to score; those whose name ends in "bf16" get rows in bfloat16, and the packed one weights too.
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
    """The weights, the same for the same width; they need a gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = RegulatedSimilarity(sizes.dim, correspondence_steps=1, aggregation_steps=2)
    return module.to(sizes.device).regulator_parameters()


def _sides(variant: str, sizes: Sizes) -> tuple[Fragments, ...]:
    sides = inputs(sizes)
    return tuple(side.to(torch.bfloat16) for side in sides) if variant.endswith("bf16") else sides


def make_regulated_scores(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient."""
    words, regions = _sides(variant, warm_up_sizes(variant, sizes) if small else sizes)
    weights = parameters(sizes)

    def run() -> Tensor:
        with torch.no_grad():
            return SCORES[variant](words, regions, weights)

    return run


def make_regulated_step(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, hardest-negative loss and backward to the gradients of words, regions and every weight."""
    words, regions = _sides(variant, warm_up_sizes(variant, sizes) if small else sizes)
    weights = parameters(sizes)
    loss = F_itm.triplet_loss if variant.startswith("native") else reference.triplet_loss
    w, r = words.values.requires_grad_(), regions.values.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        scores = SCORES[variant](words.with_values(w), regions.with_values(r), weights).t()
        return torch.autograd.grad(loss(scores, margin=0.2, mining="hardest"), (w, r, *weights.tensors()))

    return run


def accuracy(variant: str, sizes: Sizes) -> dict[str, float]:
    """Largest error of a score against float64, and the share of hardest negatives that differ from float64's."""
    weights = parameters(sizes)
    with torch.no_grad():
        sides = [side.to(torch.float64) for side in inputs(sizes)]
        exact = reference.regulated_scores_packed(sides[0], sides[1], weights.to(torch.float64))
        scores = make_regulated_scores(variant, sizes)()
    return accuracy_of(scores, exact)
