"""The workloads of the benchmark: inputs with COCO's shapes, and the variants that compute them.

Images have 36 regions, captions 8 to 24 words including start and end tokens, 13 on average. Vectors have 1024
components and unit length, like those of the encoders. A string names each variant, so that a new process can create it
too. Each `make_...` function returns the call to measure; with `small`, it is a cheap first call of the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference

__all__ = [
    "SCORES",
    "Sizes",
    "accuracy",
    "accuracy_of",
    "caption_lengths",
    "in_precision",
    "inputs",
    "loss_accuracy",
    "make_boosting",
    "make_evaluation",
    "make_loss",
    "make_scores",
    "make_step",
    "precision_of_products",
    "step_of",
    "warm_up_sizes",
    "without_gradient",
]

REGIONS = 36
ONE_BLOCK = 1 << 40


def _packed(words: Fragments, regions: Fragments) -> Tensor:
    return reference.cross_attention_scores_packed(words, regions, block_elements=ONE_BLOCK)


def precision_of_products(setting: str, score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `score` with this precision of float32 products, which its backward keeps."""

    def with_setting(*arguments: Any) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            return score(*arguments)
        finally:
            torch.set_float32_matmul_precision(before)

    return with_setting


# One function per way to score captions against images, with words as queries: (n_captions, n_images). Inputs are in
# bfloat16 if the name ends in "bf16", else in float32.
SCORES: dict[str, Callable[[Fragments, Fragments], Tensor]] = {
    "loop": reference.cross_attention_scores,
    "packed": _packed,
    "packed bounded": reference.cross_attention_scores_packed,
    "packed bf16": _packed,
    "native": F_itm.cross_attention_scores,
    "native high": precision_of_products("high", F_itm.cross_attention_scores),
    "native medium": precision_of_products("medium", F_itm.cross_attention_scores),
    "native bf16": F_itm.cross_attention_scores,
}


@dataclass(frozen=True)
class Sizes:
    """The size of a workload, and its device."""

    images: int
    captions: int
    dim: int = 1024
    device: str = "cpu"


def caption_lengths(captions: int) -> Tensor:
    """Return the number of words of each caption, int64 on the CPU; equal for equal numbers of captions."""
    # A gamma distribution, rounded and clipped to 8 ... 24, has COCO's mean of 13 and its longer tail.
    gamma = torch.distributions.Gamma(torch.tensor(5.0), torch.tensor(1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (8 + gamma.sample((captions,))).round().long().clamp(8, 24)


def inputs(sizes: Sizes) -> tuple[Fragments, Fragments]:
    """Return the words of `sizes.captions` captions and the regions of `sizes.images` images, float32."""
    # Created on their device: drawing the largest ones on the CPU takes longer than measuring them on a GPU.
    generator = torch.Generator(sizes.device).manual_seed(0)
    lengths = caption_lengths(sizes.captions)
    words = torch.randn(int(lengths.sum()), sizes.dim, generator=generator, device=sizes.device)
    regions = torch.randn(sizes.images * REGIONS, sizes.dim, generator=generator, device=sizes.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(sizes.device)
    region_offsets = torch.arange(sizes.images + 1, device=sizes.device) * REGIONS
    # With a known maximum length, torch.compile need not read it from the data.
    return (
        Fragments(torch.nn.functional.normalize(words, dim=1), offsets, max_length=int(lengths.max())),
        Fragments(torch.nn.functional.normalize(regions, dim=1), region_offsets, max_length=REGIONS),
    )


def in_precision(variant: str, sides: Sequence[Fragments]) -> tuple[Fragments, ...]:
    """Return the inputs in the dtype of a variant."""
    low = variant.removesuffix(" compiled").endswith("bf16")
    return tuple(side.to(torch.bfloat16) if low else side for side in sides)


def warm_up_sizes(variant: str, sizes: Sizes) -> Sizes:
    """Return the sizes of a first call: small, unless torch.compile compiles for one size only."""
    return sizes if variant.endswith("compiled") else replace(sizes, images=2, captions=2)


def _prepare(variant: str, sizes: Sizes, small: bool) -> tuple[Callable[..., Tensor], tuple[Fragments, ...]]:
    name = variant.removesuffix(" compiled")
    score = SCORES[name] if name == variant else torch.compile(SCORES[name], dynamic=False)
    return score, in_precision(variant, inputs(warm_up_sizes(variant, sizes) if small else sizes))


def without_gradient(score: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return score(*arguments)

    return run


def step_of(
    variant: str,
    score: Callable[[Fragments, Fragments], Tensor],
    sides: Sequence[Fragments],
    weights: Sequence[Tensor] = (),
    mining: str = "hardest",
) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, triplet loss and backward to the gradients of words, regions and `weights`.

    Native variants use the native loss, the others the loss in plain PyTorch.
    """
    loss = F_itm.triplet_loss if variant.startswith("native") else reference.triplet_loss
    words, regions = sides
    w, r = words.values.requires_grad_(), regions.values.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        scores = score(words.with_values(w), regions.with_values(r)).t()
        return torch.autograd.grad(loss(scores, margin=0.2, mining=mining), (w, r, *weights))

    return run


def make_scores(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient."""
    score, sides = _prepare(variant, sizes, small)
    return without_gradient(score, *sides)


def make_step(
    variant: str, sizes: Sizes, mining: str = "hardest", small: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """A training step from embeddings to their gradients."""
    score, sides = _prepare(variant, sizes, small)
    return step_of(variant, score, sides, mining=mining)


def make_evaluation(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], dict[str, float]]:
    """Scores of all captions with all images, ranks and recalls; five captions per image."""
    score, (words, regions) = _prepare(variant, sizes, small)
    functions: Any = F_itm if variant.startswith("native") else reference
    caption_image = torch.arange(len(words), device=sizes.device) * len(regions) // len(words)

    def run() -> dict[str, float]:
        with torch.no_grad():
            scores = score(words, regions).t().contiguous()
            summary: dict[str, float] = functions.recall_summary(*functions.retrieval_ranks(scores, caption_image))
            return summary

    return run


def _loss_of(variant: str, name: str, batch: int, mining: str, device: str) -> tuple[Callable[..., Tensor], Tensor]:
    """Return a loss of scores, and the scores of a batch, (batch, batch) within [0, 1]."""
    functions: Any = F_itm if variant == "native" else reference
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.rand(batch, batch, generator=generator, device=device)
    if name == "triplet":
        return lambda s: functions.triplet_loss(s, margin=0.2, mining=mining), scores
    anchor = torch.rand(batch, batch, generator=generator, device=device)
    return lambda s: functions.boosting_loss(s, anchor.to(s.dtype), mining=mining), scores


def _gradient_of(loss: Callable[..., Tensor], scores: Tensor) -> Callable[[], Tensor]:
    scores.requires_grad_()
    return lambda: torch.autograd.grad(loss(scores), scores)[0]


def make_loss(variant: str, batch: int, mining: str, device: str = "cpu", small: bool = False) -> Callable[[], Tensor]:
    """Value and dense gradient of the triplet loss over a score matrix, through autograd."""
    return _gradient_of(*_loss_of(variant, "triplet", 8 if small else batch, mining, device))


def make_boosting(
    variant: str, batch: int, mining: str, device: str = "cpu", small: bool = False
) -> Callable[[], Tensor]:
    """Value and dense gradient of the absolute boosting loss with an anchor branch, through autograd."""
    return _gradient_of(*_loss_of(variant, "boosting", 8 if small else batch, mining, device))


def loss_accuracy(name: str, variant: str, batch: int, mining: str, device: str = "cpu") -> dict[str, float]:
    """Return the relative error of the loss `name`, "triplet" or "boosting", against float64."""
    loss, scores = _loss_of(variant, name, batch, mining, device)
    exact = _loss_of("plain", name, batch, mining, device)[0](scores.double())
    return {"relative_loss_error": float((loss(scores) - exact).abs() / exact)}


def accuracy(variant: str, sizes: Sizes) -> dict[str, float]:
    """Return the accuracy of the scores of a variant against float64, as `accuracy_of`."""
    words, regions = inputs(sizes)
    with torch.no_grad():
        exact = reference.cross_attention_scores(words.to(torch.float64), regions.to(torch.float64))
    return accuracy_of(make_scores(variant, sizes)(), exact)


def accuracy_of(scores: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest error of scores and, if they are square, the share of different hardest negatives."""
    changed = 0.0
    if exact.shape[0] == exact.shape[1]:
        chosen, expected = (
            torch.cat([indices for _, indices in reference.hardest_negatives(s.t().contiguous())])
            for s in (scores, exact)
        )
        changed = float((chosen != expected).double().mean())
    return {"max_score_error": float((scores - exact).abs().max()), "changed_hardest_negatives": changed}
