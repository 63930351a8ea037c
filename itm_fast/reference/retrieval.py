"""Reference implementation of ranks and recalls in plain PyTorch.

`retrieval_ranks` and `recall_summary` have the signatures of `itm_fast.functional`. Ranks are counted in chunks, which
bounds memory. The functions do not check their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements compared at a time: 16 MB of booleans.
_CHUNK_ELEMENTS = 1 << 24


def retrieval_ranks(scores: Tensor, caption_image: Tensor, ties: str = "pessimistic") -> tuple[Tensor, Tensor]:
    """Return the ranks of every image and of every caption; see `itm_fast.functional.retrieval_ranks`."""
    n_images, n_captions = scores.shape
    scores = scores if scores.dtype == torch.float64 else scores.float()
    caption_image = caption_image.to(torch.int64)
    captions = torch.arange(n_captions, device=scores.device)
    own_score = scores[caption_image, captions]  # (n_captions,)
    image_to_text = scores.new_full((n_images,), -1, dtype=torch.int64)
    text_to_image = scores.new_zeros(n_captions, dtype=torch.int64)
    rows = max(_CHUNK_ELEMENTS // max(n_captions, 1), 1)
    for first in range(0, n_images if n_captions else 0, rows):
        chunk = scores[first : first + rows]
        own = caption_image == torch.arange(first, first + len(chunk), device=scores.device)[:, None]
        text_to_image += (_counts_above(chunk, own_score, ties) & ~own).sum(dim=0)
        # The highest score among the image's own captions. NaN is the lowest value.
        comparable = own & ~chunk.isnan()
        best = torch.where(comparable, chunk, -torch.inf).max(dim=1, keepdim=True).values
        best = torch.where(comparable.any(dim=1, keepdim=True), best, torch.nan)
        ranks = (_counts_above(chunk, best, ties) & ~own).sum(dim=1)
        image_to_text[first : first + rows] = torch.where(own.any(dim=1), ranks, -1)
    return image_to_text, text_to_image


def _counts_above(scores: Tensor, own: Tensor, ties: str) -> Tensor:
    """Return True where a score counts as higher than the own score. NaN is the lowest value and equals NaN."""
    higher = (scores > own) | (own.isnan() & ~scores.isnan())
    if ties == "optimistic":
        return higher
    return higher | (scores == own) | (scores.isnan() & own.isnan())


def recall_summary(image_to_text: Tensor, text_to_image: Tensor) -> dict[str, float]:
    """Return recalls in percent, median and mean ranks; see `itm_fast.functional.recall_summary`."""
    summary: dict[str, float] = {}
    for direction, ranks in (("i2t", image_to_text), ("t2i", text_to_image)):
        ranks = ranks[ranks >= 0].to(torch.float64)
        for k in (1, 5, 10):
            summary[f"{direction}_r{k}"] = 100.0 * float((ranks < k).to(torch.float64).mean())
        # For an even number of ranks, average the middle two and round down, as published implementations do.
        middle = torch.stack([ranks.kthvalue(k).values for k in ((len(ranks) + 1) // 2, len(ranks) // 2 + 1)]).mean()
        summary[f"{direction}_medr"] = float(middle.floor()) + 1.0
        summary[f"{direction}_meanr"] = float(ranks.mean()) + 1.0
    summary["rsum"] = sum(summary[f"{direction}_r{k}"] for direction in ("i2t", "t2i") for k in (1, 5, 10))
    return summary
