"""Learn pooled vectors from a model's own scores.

Inside: `learned_pooling`.

Pooled vectors of random batches of images and captions are trained so that the softmax of their inner products, over
the images of each caption and over the captions of each image, is that of the model's scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm

from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling, SetPooling

__all__ = ["learned_pooling"]

_STEPS, _BATCH, _RATE = 600, 256, 1e-3
# Images and captions that are encoded for training.
_MOST_IMAGES, _MOST_CAPTIONS = 10_000, 20_000
_TILE = 256
# The temperature of the softmax in standard deviations of the scores: smaller values look at fewer neighbours.
_SHARPNESS = 0.25


def learned_pooling(members: Members, data: CaptionDataset, *, steps: int = _STEPS, progress: bool = False) -> Pooling:
    """Train a pooling of each model that compares sets of rows; models with one vector per item keep it.

    Args:
        members: the models.
        data: images and captions; at most 10,000 and 20,000 are used.
        steps: training steps per model.
        progress: show a progress bar on a terminal.

    Returns:
        The pooling. The same models and data give the same pooling.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randperm(data.n_images, generator=generator)[:_MOST_IMAGES]
    captions = torch.randperm(len(data), generator=generator)[:_MOST_CAPTIONS]
    encoded = {
        "images": _joined([members.encode_images(data.image_batch(part)) for part in images.split(_TILE)]),
        "captions": _joined(
            [
                members.encode_captions([data.captions[number] for number in part.tolist()])
                for part in captions.split(_TILE)
            ]
        ),
    }
    owners = _positions(images, data)[captions]
    parts: list[dict[str, SetPooling] | None] = []
    with tqdm(total=steps * len(members.models), desc="pooling", unit="step", leave=False,
              disable=None if progress else True) as bar:  # fmt: skip
        for member, model in enumerate(members.models):
            own = {side: encoded[side][member] for side in encoded}
            if not all(isinstance(one, Fragments) for one in own.values()):
                parts.append(None)
                continue
            parts.append(_trained(model, own, owners, steps, generator, bar))
    return Pooling(parts)


def _positions(images: Tensor, data: CaptionDataset) -> Tensor:
    """Return the place of each caption's image among `images`, -1 if it is not there; in the order of the data set."""
    places = torch.full((data.n_images,), -1)
    places[images] = torch.arange(len(images))
    return places[data.caption_image]


def _joined(parts: list[Any]) -> list[Any]:
    return [Fragments.cat(one) if isinstance(one[0], Fragments) else torch.cat(one) for one in zip(*parts, strict=True)]


def _trained(
    model: Any, encoded: dict[str, Fragments], owners: Tensor, steps: int, generator: torch.Generator, bar: Any
) -> dict[str, SetPooling]:
    images, captions = encoded["images"], encoded["captions"]
    width = images.values.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pooling = {side: SetPooling(width) for side in encoded}
    parameters = [one for part in pooling.values() for one in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    device = next(model.parameters()).device
    for _ in range(steps):
        # Captions with their own images, so that each has a neighbour that scores high, and random images beside.
        chosen = torch.randint(len(captions), (_BATCH,), generator=generator)
        own = owners[chosen]
        random = torch.randint(len(images), (_BATCH,), generator=generator)
        some = torch.cat([own[own >= 0], random]).unique()[: 2 * _BATCH]
        left, right = images.index_select(some), captions.index_select(chosen)
        with torch.no_grad():
            scores = model.score(left.to(device), right.to(device)).cpu().float()
        products = pooling["images"](left) @ pooling["captions"](right).t()
        temperature = _SHARPNESS * scores.std().clamp(min=1e-6)
        loss = sum(
            functional.kl_div(
                (products / temperature).log_softmax(dim), (scores / temperature).softmax(dim), reduction="sum"
            )
            / scores.shape[1 - dim]
            for dim in (0, 1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.update()
    return {side: part.eval() for side, part in pooling.items()}
