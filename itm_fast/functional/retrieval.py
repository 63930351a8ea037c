"""Ranks of a retrieval run and the usual recall metrics."""

from __future__ import annotations

from torch import Tensor

from itm_fast.ops import retrieval as _ops

__all__ = ["recall_summary", "retrieval_ranks"]


def retrieval_ranks(scores: Tensor, caption_image: Tensor, ties: str = "pessimistic") -> tuple[Tensor, Tensor]:
    """Count the ranks, from 0, of image-to-text and text-to-image retrieval without sorting.

    The rank of a caption's image is the number of images that score higher for it. An image's rank is the best over its
    captions; its own captions never count against it. A NaN score counts as the lowest of all.

    Args:
        scores: `(n_images, n_captions)` float32, float64, bfloat16 or float16.
        caption_image: int32 or int64 `(n_captions,)`, the image (row of `scores`) that each caption belongs to. Any
            number of captions per image is allowed, in any order.
        ties: "pessimistic" counts an equal score as higher, "optimistic" does not.

    Returns:
        int64 ranks `(n_images,)` of the images, -1 for an image without captions, and `(n_captions,)` of the captions.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype.
        ValueError: shapes or devices do not fit, an image index is out of range (checked on the CPU), or `ties` is
            unknown.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> scores = torch.tensor([[0.9, 0.2, 0.3], [0.1, 0.4, 0.8]])
        >>> image_ranks, caption_ranks = F_itm.retrieval_ranks(scores, torch.tensor([0, 0, 1]))
        >>> image_ranks.tolist(), caption_ranks.tolist()
        ([0, 0], [0, 1, 0])
    """
    return _ops.retrieval_ranks(scores, caption_image, ties)


def recall_summary(image_to_text: Tensor, text_to_image: Tensor) -> dict[str, float]:
    """Summarise ranks: recall at 1, 5 and 10 in percent, median and mean rank, and the sum of the six recalls.

    Args:
        image_to_text: integer `(n_images,)` ranks from 0; negative ones (images without captions) are left out.
        text_to_image: integer `(n_captions,)` ranks from 0.

    Returns:
        `i2t_r1`, `i2t_r5`, `i2t_r10`, `i2t_medr`, `i2t_meanr`, the same for `t2i`, and `rsum`. Median and mean count
        from 1 as published: `floor(median) + 1` and `mean + 1`.

    Raises:
        TypeError: an argument is not an int32 or int64 tensor.
        ValueError: an argument contains no valid rank.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> summary = F_itm.recall_summary(torch.tensor([0, 0]), torch.tensor([0, 1, 0, 0]))
        >>> summary["i2t_r1"], summary["t2i_r1"], summary["rsum"]
        (100.0, 75.0, 575.0)
    """
    return _ops.recall_summary(image_to_text, text_to_image)
