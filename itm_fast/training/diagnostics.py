"""Diagnostics of SelHN and RVSE++: vanishing gradients, and the negatives that a loss uses.

Inside: `mining_diagnostics`, `image_gradient_norm`; `watched_embeddings`, `embedding_diagnostics`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.models.fragment_model import Encoded
from itm_fast.nn import l2norm, mean_pool

__all__ = ["embedding_diagnostics", "image_gradient_norm", "mining_diagnostics", "watched_embeddings"]


def mining_diagnostics(scores: Tensor, positives: Tensor | None, mining: str, epsilon: float) -> dict[str, float]:
    """Measure the spread of the scores, the gap of the hardest negatives, and the share of anchors that use them.

    Args:
        scores: (B, B) without gradient: images are rows, positives are on the diagonal.
        positives: bool (B, B), True for pairs that are not negatives; None: only the diagonal.
        mining: as in `itm_fast.functional.triplet_loss`. "hardest" and "sct" always use the hardest negative, "all"
            never does. "semi_hard" does if it scores below the positive, "selective" if its score differs from the
            positive's by more than epsilon.
        epsilon: threshold of "selective".

    Returns:
        `i2t_hardest_share` and `t2i_hardest_share`, within [0, 1], and `hardest_gap`, the mean of
        `|s_hardest - s_positive|` over the anchors of both directions. Anchors without a negative do not count; a
        number without any anchor is missing. `score_spread`, the standard deviation of all scores; missing for a
        single one, and if a score is not finite.

    Source: Figures 3d, 5d and 7 of SelHN and RVSE++ (delta s, Eq 10; the share of Eq 9's first line).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    own = scores.diagonal()
    shares, gaps, counts = [], [], []
    for hardest, _ in F_itm.hardest_negatives(scores, positives):
        gap = (hardest - own).abs()
        counted = gap.isfinite()
        if mining == "selective" and epsilon > 0:
            taken = gap > epsilon
        elif mining == "semi_hard":
            taken = hardest < own
        else:
            taken = torch.full_like(counted, mining != "all")
        shares.append((taken & counted).sum(dtype=gap.dtype))
        gaps.append(gap.masked_fill(~counted, 0.0).sum())
        counts.append(counted.sum(dtype=gap.dtype))
    # One transfer from the device for all numbers.
    spread = scores.std() if scores.numel() > 1 else own.new_full((), math.nan)
    numbers = torch.stack([*shares, *gaps, *counts, spread]).tolist()
    (rows, columns), gap_sum, (n_rows, n_columns, deviation) = numbers[:2], sum(numbers[2:4]), numbers[4:]
    named = {
        "i2t_hardest_share": (rows, n_rows),
        "t2i_hardest_share": (columns, n_columns),
        "hardest_gap": (gap_sum, n_rows + n_columns),
    }
    found = {name: total / count for name, (total, count) in named.items() if count}
    return found | ({"score_spread": deviation} if math.isfinite(deviation) else {})


@contextlib.contextmanager
def image_gradient_norm(
    model: MatchingModel, *, enabled: bool = True, after_backward: list[Callable[[], None]] | None = None
) -> Iterator[dict[str, float]]:
    """Measure the gradient norm of the first image layer in a block with a backward pass.

    The yielded dictionary gets `image_grad_norm` at the end of the block: the norm of the gradient of
    `model.first_image_weight()` before clipping. It stays empty if there is no gradient (the weight may be frozen), if
    the norm is not finite, or if not `enabled`. With several processes, the gradient is complete only after they have
    added it up: `after_backward` then lists the functions that the caller calls at that point.

    Source: Figures 3b and 5b of SelHN and RVSE++ ("gradient of the FC layer").
    """
    found: dict[str, float] = {}
    first = model.first_image_weight()
    if not (enabled and first.requires_grad):
        yield found
        return
    norms: list[Tensor] = []

    def note(weight: Tensor) -> None:
        # Kept on the device: the backward pass waits for nothing.
        if weight.grad is not None:
            norms.append(torch.linalg.vector_norm(weight.grad.float()))

    with contextlib.ExitStack() as stack:
        if after_backward is None:
            stack.callback(first.register_post_accumulate_grad_hook(note).remove)
        else:
            after_backward.append(partial(note, first))
            stack.callback(after_backward.pop)
        yield found
    if norms and math.isfinite(norm := float(norms[-1])):
        found["image_grad_norm"] = norm


@contextlib.contextmanager
def watched_embeddings(model: MatchingModel, *, enabled: bool = True) -> Iterator[list[Any]]:
    """Keep what a model encodes first in a block: the yielded list becomes [images, captions], with their graphs.

    It stays empty if the model encodes nothing by `encode` or `encode_fragments`, or if not `enabled`.
    """
    found: list[Any] = []
    if not enabled:
        yield found
        return

    def watching(encode: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            encoded = encode(*arguments, **options)
            if not found:
                found.extend((encoded.images, encoded.captions) if isinstance(encoded, Encoded) else encoded)
            return encoded

        return watched

    # On the instance, not as hooks: training computes scores and loss in one call only if no hook waits.
    names = [name for name in ("encode", "encode_fragments") if hasattr(model, name)]
    for name in names:
        setattr(model, name, watching(getattr(model, name)))
    try:
        yield found
    finally:
        for name in names:
            delattr(model, name)


@torch.no_grad()
def embedding_diagnostics(
    scores: Tensor,
    positives: Tensor | None,
    images: Any,
    captions: Any,
    gather: Callable[[Tensor], Tensor] = lambda own: own,
) -> dict[str, float]:
    """Measure how far apart the embeddings of a batch are within each modality.

    Args:
        scores: (B, B): images are rows, positives are on the diagonal.
        positives: as in `mining_diagnostics`.
        images, captions: embeddings of B items each: tensors (B, d), or Fragments. An item is represented by its
            l2-normalised vector; with Fragments by the l2-normalised mean of its rows.
        gather: returns the vectors of all items from those of this process.

    Returns:
        `hardest_distance`, the mean of `|t' - t|` over the anchors of both directions: t is the positive of an anchor
        and t' its hardest negative. `image_cosine` and `caption_cosine`, the mean cosine of two different items of the
        batch; 1 if all embeddings are equal. A number without any pair is missing, and so are all for other kinds
        of embeddings.

    Source: Eq 8 of SelHN and RVSE++. The gradient that turns an anchor has the norm `sqrt(|t' - t|^2 - ds^2)`.
    """
    of_images, of_captions = _vectors(images), _vectors(captions)
    if of_images is None or of_captions is None:
        return {}
    of_images, of_captions = gather(of_images), gather(of_captions)
    if {len(of_images), len(of_captions)} != {len(scores)}:
        return {}
    sides = {"image": of_images, "caption": of_captions}
    of_rows, of_columns = F_itm.hardest_negatives(scores, positives)
    totals, counts = [], []
    for (values, index), partners in ((of_rows, sides["caption"]), (of_columns, sides["image"])):
        counted = values.isfinite()
        distances = torch.linalg.vector_norm(partners[index.clamp(min=0)] - partners, dim=1)
        totals.append(distances.masked_fill(~counted, 0.0).sum())
        counts.append(counted.sum(dtype=distances.dtype))
    # The squared norm of the sum has each pair of different items twice, and each item with itself.
    cosines = [side.sum(0).square().sum() - side.square().sum() for side in sides.values()]
    first, second, n_first, n_second, *cosines = torch.stack([*totals, *counts, *cosines]).tolist()
    found = {"hardest_distance": (first + second) / (n_first + n_second)} if n_first + n_second else {}
    pairs = len(scores) * (len(scores) - 1)
    return found | {f"{side}_cosine": value / pairs for side, value in zip(sides, cosines, strict=True) if pairs}


def _vectors(embeddings: Any) -> Tensor | None:
    """Return a unit vector for each item, (n, d) float32 or float64; None for other kinds of embeddings."""
    if isinstance(embeddings, Fragments):
        embeddings = mean_pool(embeddings)
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        return None
    return l2norm(embeddings.detach().to(torch.promote_types(embeddings.dtype, torch.float32)))
