"""Refine pooled vectors by gradient descent: they should find the best images rather than fit all scores.

Inside: `refined`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["refined"]

Maps = tuple[Tensor, Tensor]

# Temperature and rate were chosen on captions of the emoji that were not trained on. The temperature is a share of the
# distance between the best score of a caption and its mean score.
_TEMPERATURE = 1 / 8
_STEPS, _BATCH, _RATE = 100, 256, 4e-4


def refined(captions: Tensor, images: Tensor, scores: Tensor, maps: Maps, held_out: tuple[Tensor, Tensor]) -> Maps:
    """Minimise the divergence of the softmax of inner products from the softmax of scores, over the images.

    Args:
        captions: features (C, p) float32, of unit covariance.
        images: features (N, q) float32, of unit covariance.
        scores: (C, N).
        maps: initial linear maps (p, D) and (q, D) of both features to pooled vectors.
        held_out: features (H, p) and scores (H, N) of other captions.

    Returns:
        The refined maps, or those given if these have the smaller divergence on the captions held out.

    Source: Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach" (ICML 2007), section 4.2.
    """
    spread = float((scores.amax(1) - scores.mean(1)).mean())
    if not spread > 0:
        return maps
    scale = (_TEMPERATURE * spread) ** 0.5
    # In these units the temperature is 1.
    own = [one.div(scale).requires_grad_() for one in maps]
    optimizer = torch.optim.Adam(own)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS + 1)
    generator = torch.Generator().manual_seed(0)

    def divergence(features: Tensor, wanted: Tensor) -> Tensor:
        products = (features @ own[0]) @ (images @ own[1]).t()
        targets = (wanted / scale**2).log_softmax(1)
        return torch.nn.functional.kl_div(products.log_softmax(1), targets, reduction="batchmean", log_target=True)

    with torch.no_grad():
        before = float(divergence(*held_out))
    with torch.enable_grad():
        for _ in range(_STEPS):
            chosen = torch.randint(len(captions), (min(_BATCH, len(captions)),), generator=generator)
            optimizer.zero_grad()
            divergence(captions[chosen], scores[chosen]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        # NaN is not smaller.
        if not float(divergence(*held_out)) < before:
            return maps
    return own[0].detach() * scale, own[1].detach() * scale
