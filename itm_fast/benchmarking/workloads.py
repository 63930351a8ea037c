"""Workloads of the benchmark: inputs with the sizes of COCO, and the variants of each computation.

Images have 36 regions. Captions have 8 to 24 words including start and end tokens, 13 on average. Features have 1024
components and norm 1, like the output of the encoders. Variants have names, so that a fresh process can create them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference

__all__ = [
    "SCORES",
    "Sizes",
    "accuracy",
    "accuracy_of",
    "boosting_accuracy",
    "caption_lengths",
    "inputs",
    "loss_accuracy",
    "make_boosting",
    "make_evaluation",
    "make_loss",
    "make_ranks",
    "make_scores",
    "make_step",
    "precision_of_products",
    "warm_up_sizes",
]

REGIONS = 36
ONE_BLOCK = 1 << 40


def _packed(words: Fragments, regions: Fragments) -> Tensor:
    return reference.cross_attention_scores_packed(words, regions, block_elements=ONE_BLOCK)


def precision_of_products(setting: str, score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`score` with that precision of float32 products; the backward keeps it."""

    def with_setting(*arguments: Any) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            return score(*arguments)
        finally:
            torch.set_float32_matmul_precision(before)

    return with_setting


# One function per way to score captions against images, words being the queries: (n_captions, n_images). Those whose
# name ends in "bf16" get their inputs in bfloat16, all others in float32.
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


@attrs.frozen
class Sizes:
    """Sizes and device of a workload."""

    images: int
    captions: int
    dim: int = 1024
    device: str = "cpu"


def caption_lengths(captions: int) -> Tensor:
    """Words of each caption, int64 on the CPU, the same for the same number of captions."""
    # A gamma law, rounded and cut to 8 ... 24, has COCO's mean of 13 and its longer tail.
    gamma = torch.distributions.Gamma(torch.tensor(5.0), torch.tensor(1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (8 + gamma.sample((captions,))).round().long().clamp(8, 24)


def inputs(sizes: Sizes) -> tuple[Fragments, Fragments]:
    """Words of `sizes.captions` captions and regions of `sizes.images` images, float32, the same for the same sizes."""
    # Made where they are used: drawing the largest ones on the CPU takes longer than measuring them on a GPU.
    generator = torch.Generator(sizes.device).manual_seed(0)
    lengths = caption_lengths(sizes.captions)
    words = torch.randn(int(lengths.sum()), sizes.dim, generator=generator, device=sizes.device)
    regions = torch.randn(sizes.images * REGIONS, sizes.dim, generator=generator, device=sizes.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(sizes.device)
    region_offsets = torch.arange(sizes.images + 1, device=sizes.device) * REGIONS
    # The longest set is named here so that torch.compile need not read it from the data.
    return (
        Fragments(torch.nn.functional.normalize(words, dim=1), offsets, max_length=int(lengths.max())),
        Fragments(torch.nn.functional.normalize(regions, dim=1), region_offsets, max_length=REGIONS),
    )


def _inputs_of(variant: str, sizes: Sizes, small: bool) -> tuple[Fragments, ...]:
    sides = inputs(warm_up_sizes(variant, sizes) if small else sizes)
    return tuple(side.to(torch.bfloat16) for side in sides) if _low_precision(variant) else sides


def _score_function(variant: str) -> Callable[[Fragments, Fragments], Tensor]:
    name = variant.removesuffix(" compiled")
    return SCORES[name] if name == variant else torch.compile(SCORES[name], dynamic=False)


def _low_precision(variant: str) -> bool:
    return variant.removesuffix(" compiled").endswith("bf16")


def make_scores(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], Tensor]:
    """Scores of all pairs without gradient."""
    words, regions = _inputs_of(variant, sizes, small)
    score = _score_function(variant)

    def run() -> Tensor:
        with torch.no_grad():
            return score(words, regions)

    return run


def make_step(
    variant: str, sizes: Sizes, mining: str = "hardest", small: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, triplet loss and backward to the gradients of words and regions.

    The native variants use the native loss too; the others the loss in plain PyTorch.
    """
    words, regions = _inputs_of(variant, sizes, small)
    score = _score_function(variant)
    loss = F_itm.triplet_loss if variant.startswith("native") else reference.triplet_loss
    w, r = words.values.requires_grad_(), regions.values.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        scores = score(words.with_values(w), regions.with_values(r)).t()
        return torch.autograd.grad(loss(scores, margin=0.2, mining=mining), (w, r))

    return run


def make_evaluation(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], dict[str, float]]:
    """Scores of all captions with all images, ranks and recalls; five captions an image."""
    words, regions = _inputs_of(variant, sizes, small)
    score = _score_function(variant)
    functions: Any = F_itm if variant.startswith("native") else reference
    caption_image = torch.arange(len(words), device=sizes.device) * len(regions) // len(words)

    def run() -> dict[str, float]:
        with torch.no_grad():
            scores = score(words, regions).t().contiguous()
            summary: dict[str, float] = functions.recall_summary(*functions.retrieval_ranks(scores, caption_image))
            return summary

    return run


def make_ranks(variant: str, sizes: Sizes, small: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """Ranks of a score matrix in both directions; five captions an image."""
    n_images, n_captions = (4, 20) if small else (sizes.images, sizes.captions)
    generator = torch.Generator(sizes.device).manual_seed(0)
    scores = torch.rand(n_images, n_captions, generator=generator, device=sizes.device)
    caption_image = torch.arange(n_captions, device=sizes.device) * n_images // n_captions
    functions: Any = F_itm if variant.startswith("native") else reference

    def run() -> tuple[Tensor, Tensor]:
        ranks: tuple[Tensor, Tensor] = functions.retrieval_ranks(scores, caption_image)
        return ranks

    return run


def _target(batch: int, device: str) -> Tensor:
    """Scores of a batch, (batch, batch) within [0, 1]."""
    return torch.rand(batch, batch, generator=torch.Generator(device).manual_seed(0), device=device)


def make_loss(variant: str, batch: int, mining: str, device: str = "cpu", small: bool = False) -> Callable[[], Tensor]:
    """Value and dense gradient of the triplet loss over a score matrix, through autograd."""
    scores = _target(8 if small else batch, device).requires_grad_()
    loss = F_itm.triplet_loss if variant == "native" else reference.triplet_loss

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(scores, margin=0.2, mining=mining), scores)
        return gradient

    return run


def loss_accuracy(variant: str, batch: int, mining: str, device: str = "cpu") -> dict[str, float]:
    """Error of the loss against float64, as a share of the loss."""
    scores = _target(batch, device)
    loss = F_itm.triplet_loss if variant == "native" else reference.triplet_loss
    exact = reference.triplet_loss(scores.double(), margin=0.2, mining=mining)
    return _relative(loss(scores, margin=0.2, mining=mining), exact)


def _branches(batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Scores of a target and of an anchor branch, (batch, batch) within [0, 1]."""
    generator = torch.Generator(device).manual_seed(0)
    target, anchor = torch.rand(2, batch, batch, generator=generator, device=device)
    return target, anchor


def make_boosting(
    variant: str, batch: int, mining: str, device: str = "cpu", small: bool = False
) -> Callable[[], Tensor]:
    """Value and dense gradient of the absolute boosting loss beside an anchor branch, through autograd."""
    scores, anchor = _branches(8 if small else batch, device)
    scores.requires_grad_()
    loss = F_itm.boosting_loss if variant == "native" else reference.boosting_loss

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(scores, anchor, mining=mining), scores)
        return gradient

    return run


def boosting_accuracy(variant: str, batch: int, mining: str, device: str = "cpu") -> dict[str, float]:
    """Error of the loss against float64, as a share of the loss."""
    scores, anchor = _branches(batch, device)
    loss = F_itm.boosting_loss if variant == "native" else reference.boosting_loss
    exact = reference.boosting_loss(scores.double(), anchor.double(), mining=mining)
    return _relative(loss(scores, anchor, mining=mining), exact)


def _relative(loss: Tensor, exact: Tensor) -> dict[str, float]:
    return {"relative_loss_error": float((loss - exact).abs() / exact)}


def accuracy(variant: str, sizes: Sizes) -> dict[str, float]:
    """Largest error of a score against float64, and the share of hardest negatives that differ from float64's."""
    words, regions = inputs(sizes)
    with torch.no_grad():
        exact = reference.cross_attention_scores(words.to(torch.float64), regions.to(torch.float64))
        scores = _score_function(variant)(*_inputs_of(variant, sizes, small=False))
    return accuracy_of(scores, exact)


def accuracy_of(scores: Tensor, exact: Tensor) -> dict[str, float]:
    """Largest error of scores, and where they are square, the share of hardest negatives that are others."""
    changed = 0.0
    if exact.shape[0] == exact.shape[1]:
        chosen, expected = (
            torch.cat([indices for _, indices in reference.hardest_negatives(s.t().contiguous())])
            for s in (scores, exact)
        )
        changed = float((chosen != expected).double().mean())
    return {"max_score_error": float((scores - exact).abs().max()), "changed_hardest_negatives": changed}


def warm_up_sizes(variant: str, sizes: Sizes) -> Sizes:
    """Return the sizes of the warm-up call: small, except for code that torch.compile specializes to one size."""
    return sizes if variant.endswith("compiled") else attrs.evolve(sizes, images=2, captions=2)
