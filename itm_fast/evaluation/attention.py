"""Attention of the words of a caption over the regions of an image.

Inside: `word_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.evaluation.scoring import Gallery, Scorer, evaluation_mode

__all__ = ["word_attention"]


def word_attention(model: Scorer, dataset: Gallery, captions: Tensor, *, images: Tensor | None = None) -> list[Tensor]:
    """Compute the attention weights of words over regions that the model's scores use.

    The model runs in evaluation mode without gradients, on the device of its parameters.

    Args:
        model: a model whose words attend to regions, such as SCAN with direction "t2i".
        dataset: as in `score_matrix`.
        captions: indices of captions, int64 `(n,)`.
        images: index of the image for each caption, int64 `(n,)`; None: the caption's own image.

    Returns:
        One float32 tensor `(n_words, n_regions)` per caption, on the CPU. Each row sums to one. The first row belongs
        to `<start>`, the last to `<end>`.

    Raises:
        ValueError: the words of this model do not attend to regions.
    """
    attention = getattr(model, "word_attention", None)
    if attention is None:
        raise ValueError(f"model: the words of {type(model).__name__} do not attend to regions")
    images = dataset.caption_image[captions] if images is None else images
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with evaluation_mode(model):
        regions = model.encode_images(dataset.image_batch(images).to(device))
        token_ids, lengths = dataset.caption_batch(captions)
        words = model.encode_captions(token_ids.to(device), lengths.to(device))
        return [weights.cpu() for weights in attention(regions, words)]
