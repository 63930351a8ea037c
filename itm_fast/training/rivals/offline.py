"""Hard negatives of the whole training set, found by the streaming scorer.

Inside: `offline_negatives`, `paired_scores`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from itm_fast.evaluation import Gallery, top_k
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel

__all__ = ["offline_negatives", "paired_scores"]

# Pairs scored at a time: a model scores all images of a group with all its captions.
_GROUP = 8


def offline_negatives(
    model: MatchingModel, data: Gallery, candidates: int, epochs: int, random: np.random.Generator
) -> Tensor:
    """Draw an offline hard caption and a caption of an offline hard image for each caption and epoch.

    The candidates of an image are its best captions of other images, those of a caption its best other images. The
    share of the images that are candidates is that of the captions: with five captions per image, 300 captions and 60
    images. Both draws use the same place in the order, as in the official code of AOQ.

    Args:
        model: scores all pairs of the training set in evaluation mode.
        data: the training set.
        candidates: number of candidate captions.
        epochs: number of draws for each caption.
        random: draws places.

    Returns:
        (epochs, 2, n_captions) int32: the offline caption, and a random caption of the offline image. -1: there is no
        caption of another image, or no image with captions.

    Raises:
        ValueError: a batch cannot be read.
    """
    owners = data.caption_image
    per_image = torch.bincount(owners, minlength=data.n_images)
    most = int(per_image.max()) if len(owners) else 0
    ratio = max(len(owners) // max(int((per_image > 0).sum()), 1), 1)
    with_captions = per_image.nonzero()[:, 0]
    (_, captions), (_, images) = top_k(
        model,
        data,
        candidates + most,
        images=with_captions,
        images_per_caption=max(candidates // ratio, 1) + 1,
    )
    rows = torch.full((data.n_images,), -1, dtype=torch.int64)
    rows[with_captions] = torch.arange(len(with_captions))
    places = random.integers(candidates, size=(epochs, len(owners)))
    # Captions of an image are next to each other in this order.
    order = torch.argsort(owners, stable=True)
    first = torch.cumsum(per_image, 0) - per_image
    drawn = np.full((epochs, 2, len(owners)), -1, dtype=np.int32)
    for caption, image in enumerate(owners.tolist()):
        found = captions[rows[image]]
        others = found[owners[found] != image][:candidates].numpy()
        likely = images[caption]
        likely = likely[likely != image][: max(candidates // ratio, 1)]
        for epoch in range(epochs):
            place = int(places[epoch, caption])
            if len(others):
                drawn[epoch, 0, caption] = others[place % len(others)]
            if len(likely):
                chosen = int(likely[place // ratio % len(likely)])
                drawn[epoch, 1, caption] = int(order[first[chosen] + int(random.integers(int(per_image[chosen])))])
    return torch.from_numpy(drawn)


def paired_scores(model: MatchingModel, images: Any, captions: Any) -> Tensor:
    """Score image i with caption i, for each i: (n,). Embeddings are as the encoders return them."""
    count = _count(images)
    parts = []
    for start in range(0, count, _GROUP):
        chosen = torch.arange(start, min(start + _GROUP, count))
        parts.append(model.score(selected(images, chosen), selected(captions, chosen)).diagonal())
    return torch.cat(parts) if parts else torch.zeros(0)


def selected(sets: Any, numbers: Tensor) -> Any:
    """Return some items of embeddings: Fragments, a tensor, or a container of these."""

    def of_part(part: Any) -> Any:
        return part.index_select(numbers) if isinstance(part, Fragments) else part[numbers.to(part.device)]

    return _pytree.tree_map(of_part, sets, is_leaf=lambda one: isinstance(one, Fragments))


def _count(sets: Any) -> int:
    leaves = _pytree.tree_leaves(sets, is_leaf=lambda one: isinstance(one, Fragments))
    return len(leaves[0])
