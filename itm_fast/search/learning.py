"""Learn pooled vectors from a model's own scores, in closed form.

Inside: `learned_pooling`.

With features F_i of the images and F_c of the captions (`pooling.set_features`, centred, and a constant), the model's
scores S are fitted by `F_c M F_i'`: M minimises the squared error with a ridge on both sides. The singular value
decomposition of M between the roots of both covariances gives the best vectors of a given width: `F_c M F_i'` is then
an inner product of two short vectors. The landmarks of both sides are words of the captions: cross-attention looks for
the region that fits a word best, and so does the greatest product with a landmark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling, SetPooling, set_features

__all__ = ["learned_pooling"]

WIDTH, LANDMARKS = 256, 512
# Images and captions whose scores are fitted.
_MOST_IMAGES, _MOST_CAPTIONS = 4000, 2000
_TILE = 256
# Of the mean variance of the features.
_RIDGE = 1e-4


def learned_pooling(members: Members, data: CaptionDataset, *, progress: bool = False) -> Pooling:
    """Fit the pooling of each model that compares sets of rows; models with one vector per item keep it.

    Args:
        members: the models.
        data: images and captions; up to 4,000 and 2,000 of them are drawn at random.
        progress: show a progress bar on a terminal.

    Returns:
        The pooling. The same models and data give the same pooling.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randperm(data.n_images, generator=generator)[:_MOST_IMAGES].split(_TILE)
    captions = torch.randperm(len(data), generator=generator)[:_MOST_CAPTIONS].split(_TILE)
    steps = len(images) * (1 + len(members.models)) + len(captions)
    hidden = None if progress else True
    with tqdm(total=steps, desc="pooling", unit="tile", leave=False, disable=hidden) as bar:

        def seen(encodings: Any) -> Any:
            bar.update()
            return encodings

        left = [seen(members.encode_images(data.image_batch(part))) for part in images]
        right = [seen(members.encode_captions([data.captions[one] for one in part.tolist()])) for part in captions]
        parts: list[dict[str, SetPooling] | None] = []
        for member, model in enumerate(members.models):
            of_images, of_captions = [part[member] for part in left], [part[member] for part in right]
            if not isinstance(of_images[0], Fragments) or not isinstance(of_captions[0], Fragments):
                parts.append(None)
                continue
            words = Fragments.cat(of_captions)
            rows = torch.randperm(len(words.values), generator=generator)[:LANDMARKS]
            tiles = (seen(Members.scores_of(model, "captions", words, part)) for part in of_images)
            parts.append(_fitted(of_images, words, words.values[rows], tiles))
    return Pooling(parts)


def _fitted(images: list[Fragments], captions: Fragments, landmarks: Tensor, tiles: Any) -> dict[str, SetPooling]:
    """Fit one model; `tiles` gives its scores (n_captions, n_images of the part) for each part of the images."""
    features = {
        "images": torch.cat([set_features(part, landmarks) for part in images]).double(),
        "captions": set_features(captions, landmarks).double(),
    }
    means = {side: one.mean(0) for side, one in features.items()}
    centred = {side: torch.cat([one - means[side], one.new_ones(len(one), 1)], 1) for side, one in features.items()}
    product, first = torch.zeros((), dtype=torch.float64), 0
    for tile in tiles:
        last = first + tile.shape[1]
        product = product + (centred["captions"].t() @ tile.double()) @ centred["images"][first:last]
        first = last
    product = product / (len(captions) * first)
    roots = {side: _inverse_root(one.t() @ one / len(one)) for side, one in centred.items()}
    left, values, right = torch.linalg.svd(roots["captions"] @ product @ roots["images"], full_matrices=False)
    width = min(WIDTH, len(values))
    maps = {
        "captions": roots["captions"] @ left[:, :width] * values[:width],
        "images": roots["images"] @ right[:width].t(),
    }
    return {
        side: SetPooling(
            landmarks.clone(),
            one[:-1].float().contiguous(),
            (one[-1] - means[side] @ one[:-1]).float(),
        )
        for side, one in maps.items()
    }


def _inverse_root(covariance: Tensor) -> Tensor:
    """Return the inverse square root of a covariance with the ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0) + _RIDGE * covariance.diagonal().mean()
    return (vectors * values.rsqrt()) @ vectors.t()
