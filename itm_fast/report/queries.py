"""Search results of a report, from a score matrix.

Inside: `text_query`, `image_query`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.report.content import Hit, ImageQuery, TextQuery

__all__ = ["image_query", "text_query"]


def text_query(scores: Tensor, caption_image: Tensor, captions: list[str], caption: int, top: int = 5) -> TextQuery:
    """Return the `top` pictures for one caption; if its own picture ranks lower, add it at the end.

    Args:
        scores: `(n_images, n_captions)`.
        caption_image: index of the image of each caption, int64 `(n_captions,)`.
        captions: texts of the captions.
        caption: index of the caption.
        top: number of pictures.
    """
    own = torch.zeros(scores.shape[0], dtype=torch.bool)
    own[caption_image[caption]] = True
    return TextQuery(captions[caption], _hits(scores[:, caption], own, top))


def image_query(scores: Tensor, caption_image: Tensor, image: int, top: int = 5) -> ImageQuery:
    """Return the `top` captions for one picture; if all its own captions rank lower, add the best one at the end."""
    return ImageQuery(image, _hits(scores[image], caption_image == image, top))


def _hits(scores: Tensor, right: Tensor, top: int) -> list[Hit]:
    order = torch.argsort(scores, descending=True, stable=True).tolist()
    shown = order[:top]
    hits = [Hit(item, rank, bool(right[item])) for rank, item in enumerate(shown, start=1)]
    if not any(hit.right for hit in hits):
        rank = next((rank for rank, item in enumerate(order, start=1) if right[item]), None)
        if rank is not None:
            hits.append(Hit(order[rank - 1], rank, True))
    return hits
