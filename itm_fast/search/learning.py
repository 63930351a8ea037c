"""Learn pooled vectors from a model's own scores, in closed form.

Inside: `learned_pooling`, `pooling_of`, `best_blend`.

With features F_i of the images and F_c of the captions (`pooling.set_features`, centred, and a constant), the model's
scores S are fitted by `F_c M F_i'`: M minimises the squared error with a ridge on both sides. The singular value
decomposition of M between the roots of both covariances gives the best vectors of a given width: `F_c M F_i'` is then
an inner product of two short vectors. Features are scaled to unit variance first. Landmarks and words are word
embeddings of the captions: cross-attention looks for the region that fits a word best, and so does the greatest product
with a landmark. Captions also tell which words they contain, which costs nothing per image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search.members import Encodings, Members
from itm_fast.search.pooling import Pooling, SetPooling, set_features
from itm_fast.search.rows import best_rows

__all__ = ["best_blend", "learned_pooling", "pooling_of"]

WIDTH, LANDMARKS, WORDS = 256, 512, 1024
# Images and captions whose scores are fitted.
_MOST_IMAGES, _MOST_CAPTIONS = 4000, 2000
_TILE = 256
# Added to the variances, which are 1.
_RIDGE = 1e-2
# Weights of the inner product and of MaxSim to choose from, by the recall with few candidates on these captions.
# Of equal ones the first: MaxSim orders better, the more items there are.
_BLENDS = ((0.0, 1.0), (1.0, 4.0), (1.0, 2.0), (1.0, 1.0), (1.0, 0.0))
_BLEND_CAPTIONS, _BLEND_CANDIDATES, _TOP = 200, 20, 10


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
    with tqdm(total=steps, desc="pooling", unit="tile", leave=False, disable=None if progress else True) as bar:

        def seen(encodings: Any) -> Any:
            bar.update()
            return encodings

        return pooling_of(
            members,
            [seen(members.encode_images(data.image_batch(part))) for part in images],
            [seen(members.encode_captions([data.captions[one] for one in part.tolist()])) for part in captions],
            seen,
        )


def pooling_of(
    members: Members,
    images: Sequence[Encodings],
    captions: Sequence[Encodings],
    seen: Callable[[Tensor], Tensor] = lambda scores: scores,
) -> Pooling:
    """Fit the pooling of each model to its scores of these images and captions, which come in parts.

    Args:
        members: the models.
        images: embeddings of images.
        captions: embeddings of captions.
        seen: takes and returns the scores of a part, for a progress bar.
    """
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[str, SetPooling] | None] = []
    for member, model in enumerate(members.models):
        of_images, of_captions = [part[member] for part in images], [part[member] for part in captions]
        if not isinstance(of_images[0], Fragments) or not isinstance(of_captions[0], Fragments):
            parts.append(None)
            continue
        words = Fragments.cat(of_captions)
        rows = words.values[torch.randperm(len(words.values), generator=generator)[:WORDS]]
        tiles = (seen(Members.scores_of(model, "captions", words, part)) for part in of_images)
        parts.append(_fitted(of_images, words, rows, tiles))
    if all(part is None for part in parts):
        return Pooling(parts)
    few = [_first(column, _BLEND_CAPTIONS) for column in zip(*captions, strict=True)]
    return Pooling(parts, best_blend(members, Pooling(parts), images, few))


def _first(parts: Sequence[Any], count: int) -> Any:
    if isinstance(parts[0], Fragments):
        whole = Fragments.cat(parts)
        return whole.index_select(torch.arange(min(count, len(whole))))
    return torch.cat(list(parts))[:count]


def best_blend(
    members: Members, pooling: Pooling, images: Sequence[Encodings], captions: Encodings
) -> tuple[float, float]:
    """Return the weights of inner product and MaxSim with the best recall of the ten best images among 20.

    Args:
        members: the models.
        pooling: their pooling.
        images: embeddings of images in parts.
        captions: embeddings of captions, the queries.
    """
    scores = torch.cat([members.scores(captions, "captions", part, "images") for part in images], 1)
    vectors = pooling("captions", captions)
    products = torch.cat([vectors @ pooling("images", part).t() for part in images], 1)
    fits = torch.cat([best_rows(captions, part) for part in images], 1)
    wanted = scores.topk(min(_TOP, scores.shape[1])).indices

    def recall(blend: tuple[float, float]) -> float:
        blended = blend[0] * products + blend[1] * fits
        found = blended.topk(min(_BLEND_CANDIDATES, scores.shape[1])).indices
        return float((wanted[:, :, None] == found[:, None]).any(2).double().mean())

    return max(_BLENDS, key=recall)


def _fitted(images: list[Fragments], captions: Fragments, words: Tensor, tiles: Any) -> dict[str, SetPooling]:
    """Fit one model; `tiles` gives its scores (n_captions, n_images of the part) for each part of the images."""
    landmarks, none = words[:LANDMARKS], words[:0]
    features = {
        "images": torch.cat([set_features(part, landmarks, none) for part in images]).double(),
        "captions": set_features(captions, landmarks, words).double(),
    }
    means = {side: one.mean(0) for side, one in features.items()}
    scales = {side: one.std(0, correction=0).clamp(min=1e-9) for side, one in features.items()}
    centred = {
        side: torch.cat([(one - means[side]) / scales[side], one.new_ones(len(one), 1)], 1)
        for side, one in features.items()
    }
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
    found = {}
    for side, one in maps.items():
        projection = one[:-1] / scales[side][:, None]
        own = words if side == "captions" else none
        bias = one[-1] - means[side] @ projection
        found[side] = SetPooling(landmarks.clone(), own.clone(), projection.float().contiguous(), bias.float())
    return found


def _inverse_root(covariance: Tensor) -> Tensor:
    """Return the inverse square root of a covariance with the ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * (values.clamp(min=0) + _RIDGE).rsqrt()) @ vectors.t()
