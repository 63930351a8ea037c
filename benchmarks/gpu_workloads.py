"""Workloads that only the benchmark of a GPU measures: scores with their loss in one call, long sets, ranks.

A maker returns the call to measure, as in itm_fast.benchmarking.workloads; with `small`, a cheap first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from benchmarks import long_sets
from benchmarks.long_sets import PatchSizes
from itm_fast import Fragments, reference
from itm_fast.benchmarking import workloads
from itm_fast.benchmarking.workloads import Sizes

__all__ = ["PATCH_SIZES", "long_accuracy", "make_long_scores", "make_long_step", "make_matching_step", "make_ranks"]

# Pictures of 14 x 14 and 24 x 24 patches, with short and long captions.
PATCH_SIZES = tuple(PatchSizes(64, 512, patches, tokens) for patches in (196, 576) for tokens in (32, 64))


def make_matching_step(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """A training step from embeddings to their gradients; native variants score and compute the loss in one call."""
    if not variant.startswith("native"):
        return workloads.make_step(variant, sizes, small=small)
    words, regions = workloads.in_precision(
        variant, workloads.inputs(workloads.warm_up_sizes(variant, sizes) if small else sizes)
    )
    w, r = words.values.requires_grad_(), regions.values.requires_grad_()
    setting = variant.partition(" ")[2]

    def loss_of(words: Fragments, regions: Fragments) -> Tensor:
        return F_itm.matching_loss(words, regions, margin=0.2)[0]

    score = workloads.precision_of_products(setting, loss_of) if setting in ("high", "medium") else loss_of
    return lambda: torch.autograd.grad(score(words.with_values(w), regions.with_values(r)), (w, r))


def make_long_scores(variant: str, sizes: PatchSizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient, of pictures with many patches."""
    return long_sets.make_call(variant, "scores", sizes, small)


def make_long_step(variant: str, sizes: PatchSizes, small: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """A training step with hardest negatives, of pictures with many patches."""
    step: Callable[[], tuple[Tensor, ...]] = long_sets.make_call(variant, "step", sizes, small)
    return step


def long_accuracy(variant: str, sizes: PatchSizes) -> dict[str, float]:
    """Return the largest error of the scores of a variant against float64."""
    return {"max_score_error": long_sets.accuracy(variant, sizes)}


def make_ranks(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """Ranks of a score matrix in both directions; five captions per image."""
    n_images, n_captions = (4, 20) if small else (sizes.images, sizes.captions)
    generator = torch.Generator(sizes.device).manual_seed(0)
    scores = torch.rand(n_images, n_captions, generator=generator, device=sizes.device)
    caption_image = torch.arange(n_captions, device=sizes.device) * n_images // n_captions
    functions: Any = F_itm if variant.startswith("native") else reference
    return lambda: functions.retrieval_ranks(scores, caption_image)
