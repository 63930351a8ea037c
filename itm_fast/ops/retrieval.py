"""`retrieval_ranks` and `recall_summary`: argument checks, fake kernel and fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.fragments import has_values
from itm_fast.ops.library import register_fake, use_native
from itm_fast.reference import validation

TIES = ("pessimistic", "optimistic")


def retrieval_ranks(scores: Tensor, caption_image: Tensor, ties: str) -> tuple[Tensor, Tensor]:
    validation.check_option("ties", ties, TIES)
    validation.check_tensor("scores", scores, ("n_images", "n_captions"))
    validation.check_tensor("caption_image", caption_image, ("n_captions",), validation.INTEGER)
    validation.check_shape("caption_image", caption_image, scores.shape[1:], "as many as scores has columns")
    validation.check_same_device("caption_image", caption_image, "scores", scores)
    # Reading values would break the torch.compile graph and synchronize the GPU. The CPU kernel checks them again.
    if has_values(caption_image) and (scores.device.type == "cpu" or validation.debugging()):
        check_caption_image(caption_image, scores.shape[0])
    if not use_native("retrieval_ranks", scores):
        return reference.retrieval_ranks(scores.detach(), caption_image, ties)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    ranks: tuple[Tensor, Tensor] = torch.ops.itm_fast.retrieval_ranks(
        scores.detach(), caption_image.to(torch.int64), ties == "pessimistic"
    )
    return ranks


def check_caption_image(caption_image: Tensor, n_images: int) -> None:
    """Raise for an image index outside 0 to n_images - 1; the message names the caption."""
    outside = ((caption_image < 0) | (caption_image >= n_images)).nonzero()
    if len(outside):
        caption = int(outside[0])
        image = int(caption_image[caption])
        raise ValueError(f"caption_image: expected images from 0 to {n_images - 1}, got {image} for caption {caption}")


def recall_summary(image_to_text: Tensor, text_to_image: Tensor) -> dict[str, float]:
    for name, ranks in (("image_to_text", image_to_text), ("text_to_image", text_to_image)):
        validation.check_tensor(name, ranks, ("n",), validation.INTEGER)
        if not bool((ranks >= 0).any()):
            raise ValueError(f"{name}: expected at least one rank of 0 or more, got {len(ranks)} ranks without one")
    return reference.recall_summary(image_to_text, text_to_image)


@register_fake("retrieval_ranks")
def _retrieval_ranks_fake(scores: Tensor, caption_image: Tensor, pessimistic: bool) -> tuple[Tensor, Tensor]:
    n_images, n_captions = scores.shape
    return scores.new_empty(n_images, dtype=torch.int64), scores.new_empty(n_captions, dtype=torch.int64)
