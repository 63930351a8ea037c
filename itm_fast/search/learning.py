"""Learn pooled vectors from a model's own scores: in closed form, then by some steps of gradient descent.

Inside: `learned_pooling`, `pooling_of`, `best_blend`.

With features F_i of the images and F_c of the captions (`pooling.set_features`, centred, and a constant), the model's
scores S are fitted by `F_c M F_i'`: M minimises the squared error with a ridge on both sides. The singular value
decomposition of M between the roots of both covariances gives the best vectors of a given width: `F_c M F_i'` is then
an inner product of two short vectors. Features are scaled to unit variance first. All scores count alike in this fit;
`refining` then gives more weight to the greatest scores of each caption.

Landmarks and words are word embeddings of the captions: cross-attention looks for the region that fits a word best, and
so does the greatest product with a landmark. Captions also tell which words they contain, at no cost per image.
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
from itm_fast.search.refining import refined
from itm_fast.search.rows import best_rows

__all__ = ["best_blend", "learned_pooling", "pooling_of"]

WIDTH, LANDMARKS, WORDS = 256, 512, 1024
# Images and captions whose scores are fitted; captions that are held out, at most one in `_SHARE`.
_MOST_IMAGES, _MOST_CAPTIONS = 4000, 2000
_MOST_HELD_OUT, _SHARE = 200, 10
_TILE = 256
# Added to the variances, which are 1.
_RIDGE = 1e-2
# Weights of the inner product and of MaxSim to choose from, by the recall with few candidates on captions held out.
# Of equal ones the first: MaxSim orders better, the more items there are.
_BLENDS = ((0.0, 1.0), (1.0, 8.0), (1.0, 4.0), (1.0, 2.0), (1.0, 1.0), (1.0, 0.0))
_BLEND_CANDIDATES, _TOP = 20, 10


def learned_pooling(members: Members, data: CaptionDataset, *, progress: bool = False) -> Pooling:
    """Fit the pooling of each model that compares sets of rows; models with one vector per item keep it.

    Args:
        members: the models.
        data: images and captions; up to 4,000 and 2,000 of them are drawn at random, and 200 captions to choose with.
        progress: show a progress bar on a terminal.

    Returns:
        The pooling. The same models and data give the same pooling.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randperm(data.n_images, generator=generator)[:_MOST_IMAGES].split(_TILE)
    order = torch.randperm(len(data), generator=generator).tolist()
    last = min(len(order) // _SHARE, _MOST_HELD_OUT)
    others, fitted = order[:last] or order, order[last:][:_MOST_CAPTIONS]
    captions = [fitted[first : first + _TILE] for first in range(0, len(fitted), _TILE)]
    steps = len(images) * (1 + len(members.models)) + len(captions)
    with tqdm(total=steps, desc="pooling", unit="tile", leave=False, disable=None if progress else True) as bar:

        def seen(encodings: Any) -> Any:
            bar.update()
            return encodings

        return pooling_of(
            members,
            [seen(members.encode_images(data.image_batch(part))) for part in images],
            [seen(members.encode_captions([data.captions[one] for one in part])) for part in captions],
            members.encode_captions([data.captions[one] for one in others]),
            seen,
        )


def pooling_of(
    members: Members,
    images: Sequence[Encodings],
    captions: Sequence[Encodings],
    held_out: Encodings,
    seen: Callable[[Tensor], Tensor] = lambda scores: scores,
) -> Pooling:
    """Fit the pooling of each model to its scores of these images and captions, which come in parts.

    Args:
        members: the models.
        images: embeddings of images.
        captions: embeddings of captions.
        held_out: embeddings of other captions, which decide whether to refine, and choose the blend.
        seen: takes and returns the scores of a part, for a progress bar.
    """
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[str, SetPooling] | None] = []
    for member, model in enumerate(members.models):
        of_images, of_captions = [part[member] for part in images], [part[member] for part in captions]
        if not isinstance(of_images[0], Fragments) or not isinstance(of_captions[0], Fragments):
            parts.append(None)
            continue
        words, others = Fragments.cat(of_captions), held_out[member]
        rows = words.values[torch.randperm(len(words.values), generator=generator)[:WORDS]]
        scores = torch.cat([seen(Members.scores_of(model, "captions", words, part)) for part in of_images], 1)
        of_others = torch.cat([Members.scores_of(model, "captions", others, part) for part in of_images], 1)
        parts.append(_fitted(of_images, words, rows, scores, others, of_others))
    if all(part is None for part in parts):
        return Pooling(parts)
    return Pooling(parts, best_blend(members, Pooling(parts), images, held_out))


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


def _fitted(
    images: list[Fragments],
    captions: Fragments,
    words: Tensor,
    scores: Tensor,
    held_out: Fragments,
    held_out_scores: Tensor,
) -> dict[str, SetPooling]:
    """Fit one model to its scores (n_captions, n_images); with those of other captions, decide whether to refine."""
    landmarks, none = words[:LANDMARKS], words[:0]
    features = {
        "images": torch.cat([set_features(part, landmarks, none) for part in images]).double(),
        "captions": set_features(captions, landmarks, words).double(),
    }
    means = {side: one.mean(0) for side, one in features.items()}
    scales = {side: one.std(0, correction=0).clamp(min=1e-9) for side, one in features.items()}

    def centred(side: str, own: Tensor) -> Tensor:
        return torch.cat([(own - means[side]) / scales[side], own.new_ones(len(own), 1)], 1)

    standard = {side: centred(side, one) for side, one in features.items()}
    product = standard["captions"].t() @ scores.double() @ standard["images"] / scores.numel()
    roots = {side: _inverse_root(one.t() @ one / len(one)) for side, one in standard.items()}
    left, values, right = torch.linalg.svd(roots["captions"] @ product @ roots["images"], full_matrices=False)
    width = min(WIDTH, len(values))
    # The same length on both sides.
    halves = values[:width].sqrt()
    others = centred("captions", set_features(held_out, landmarks, words).double()) @ roots["captions"]
    white = refined(
        (standard["captions"] @ roots["captions"]).float(),
        (standard["images"] @ roots["images"]).float(),
        scores,
        ((left[:, :width] * halves).float(), (right[:width].t() * halves).float()),
        (others.float(), held_out_scores),
    )
    found = {}
    for side, one in zip(("captions", "images"), white, strict=True):
        projection = roots[side] @ one.double()
        own = words if side == "captions" else none
        bias = projection[-1] - (means[side] / scales[side]) @ projection[:-1]
        projection = projection[:-1] / scales[side][:, None]
        found[side] = SetPooling(landmarks.clone(), own.clone(), projection.float().contiguous(), bias.float())
    return found


def _inverse_root(covariance: Tensor) -> Tensor:
    """Return the inverse square root of a covariance with the ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * (values.clamp(min=0) + _RIDGE).rsqrt()) @ vectors.t()
