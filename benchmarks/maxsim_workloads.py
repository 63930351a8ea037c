"""The workloads of MaxSim: rows of unit length in sets of equal size, scored in the direction of the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.benchmarking import workloads
from itm_fast.benchmarking.workloads import Sizes, precision_of_products

__all__ = ["SCORES", "MaxsimSizes", "accuracy", "inputs", "make_maxsim_scores", "make_maxsim_step"]

# One function per way to score. Rows are in bfloat16 if the name ends in "bf16".
SCORES: dict[str, Callable[[Fragments, Fragments], Tensor]] = {
    "loop": reference.maxsim_scores,
    "packed": reference.maxsim_scores_packed,
    "packed bf16": reference.maxsim_scores_packed,
    "native": F_itm.maxsim_scores,
    "native high": precision_of_products("high", F_itm.maxsim_scores),
    "native medium": precision_of_products("medium", F_itm.maxsim_scores),
    "native bf16": F_itm.maxsim_scores,
}


@dataclass(frozen=True)
class MaxsimSizes(Sizes):
    """The size of a workload: `captions` query sets of `words` rows, `images` context sets of `patches` rows."""

    words: int = 32
    patches: int = 196


def inputs(sizes: MaxsimSizes) -> tuple[Fragments, Fragments]:
    """Return query sets and context sets, float32."""
    generator = torch.Generator(sizes.device).manual_seed(0)

    def sets(count: int, length: int) -> Fragments:
        rows = torch.randn(count * length, sizes.dim, generator=generator, device=sizes.device)
        offsets = torch.arange(count + 1, device=sizes.device) * length
        return Fragments(torch.nn.functional.normalize(rows, dim=1), offsets, max_length=length)

    return sets(sizes.captions, sizes.words), sets(sizes.images, sizes.patches)


def _sides(variant: str, sizes: MaxsimSizes, small: bool) -> tuple[Fragments, ...]:
    return workloads.in_precision(variant, inputs(replace(sizes, images=2, captions=2) if small else sizes))


def make_maxsim_scores(variant: str, sizes: MaxsimSizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient."""
    return workloads.without_gradient(SCORES[variant], *_sides(variant, sizes, small))


def make_maxsim_step(variant: str, sizes: MaxsimSizes, small: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, hardest-negative loss and backward to the gradients of both sides."""
    return workloads.step_of(variant, SCORES[variant], _sides(variant, sizes, small))


def accuracy(variant: str, sizes: MaxsimSizes) -> dict[str, float]:
    """Return the accuracy of the scores of a variant against float64, as `workloads.accuracy_of`."""
    with torch.no_grad():
        exact = reference.maxsim_scores_packed(*(side.to(torch.float64) for side in inputs(sizes)))
    return workloads.accuracy_of(make_maxsim_scores(variant, sizes)(), exact)
