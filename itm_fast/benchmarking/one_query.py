"""Workload of a search: score one caption against a gallery of images, with and without prepared images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.benchmarking.workloads import (
    REGIONS,
    Sizes,
    accuracy_of,
    in_precision,
    inputs,
    warm_up_sizes,
    without_gradient,
)

__all__ = ["QUERIES", "WORDS", "accuracy", "make_query"]

WORDS = 12

Score = Callable[[Fragments], Tensor]


def _plain(regions: Fragments) -> Score:
    """The published defaults in plain PyTorch for one caption and images of equally many regions."""
    images = regions.values.view(len(regions), REGIONS, -1)
    grams = images @ images.transpose(1, 2)

    def score(words: Fragments) -> Tensor:
        raw = (regions.values @ words.values.t()).view(len(regions), REGIONS, -1)
        clipped = functional.leaky_relu(raw, 0.1)
        attention = (9.0 * clipped / (clipped.norm(dim=2, keepdim=True) + 1e-8)).softmax(1)
        squared = (attention * (grams @ attention)).sum(1)
        norms = squared.sqrt() * words.values.norm(dim=1)
        return ((attention * raw).sum(1) / norms.clamp(min=1e-8)).mean(1)[None]

    return score


def _native(regions: Fragments) -> Score:
    return lambda words: F_itm.cross_attention_scores(words, regions)


def _prepared(regions: Fragments) -> Score:
    prepared = F_itm.prepare(regions)
    return lambda words: F_itm.cross_attention_scores(words, prepared)


# Each takes the regions, once, and gives what scores the words of one caption. Inputs are in bfloat16 where the name
# ends in "bf16", else in float32.
QUERIES: dict[str, Callable[[Fragments], Score]] = {
    "plain": _plain,
    "native": _native,
    "prepared": _prepared,
    "native bf16": _native,
    "prepared bf16": _prepared,
}


def _sides(sizes: Sizes) -> tuple[Fragments, Fragments]:
    # Two captions have at least 16 words.
    words, regions = inputs(replace(sizes, captions=2))
    return Fragments(words.values[:WORDS], torch.tensor([0, WORDS])), regions


def make_query(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of one caption with all images. Everything that depends only on the images is computed before."""
    words, regions = in_precision(variant, _sides(warm_up_sizes(variant, sizes) if small else sizes))
    with torch.no_grad():
        return without_gradient(QUERIES[variant](regions), words)


def accuracy(variant: str, sizes: Sizes) -> dict[str, float]:
    """Return the largest error of a score against float64."""
    words, regions = (part.to(torch.float64) for part in _sides(sizes))
    exact = reference.cross_attention_scores_packed(words, regions)
    return {"max_score_error": accuracy_of(make_query(variant, sizes)(), exact)["max_score_error"]}
