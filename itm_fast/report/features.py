"""Embeddings of images and captions in a plane by t-SNE, as in Figure 2a of FDF and Figure 5 of DBL.

Inside: `write_features`, made of `pooled_features`, `in_planes` and `draw_planes`; `check_tsne`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.data import PrecomputedDataset
from itm_fast.evaluation.scoring import evaluation_mode
from itm_fast.files.messages import printable, shortened
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.nn import mean_pool
from itm_fast.report.comparison import check_suffix, point_style, write_figure

__all__ = ["check_tsne", "draw_planes", "in_planes", "pooled_features", "write_features"]

_SIDES = ("Images", "Captions")
_COLUMNS, _MAX_NAME = 3, 40
_PERPLEXITY = 30.0


def pooled_features(model: MatchingModel, dataset: PrecomputedDataset, count: int = 200) -> tuple[Tensor, Tensor]:
    """Return vectors (n, d) of the first `count` images that have captions, and of their first captions.

    A vector is an embedding, or the mean of the fragments of one.

    Raises:
        ValueError: the model encodes images or captions as something else than vectors or fragments.
    """
    images, captions = np.unique(dataset.caption_image.numpy(), return_index=True)
    token_ids, lengths = dataset.caption_batch(captions[:count])
    device = next(model.parameters()).device
    with evaluation_mode(model):
        sides = (
            model.encode_images(dataset.image_batch(images[:count]).to(device)),
            model.encode_captions(token_ids.to(device), lengths.to(device)),
        )
    return _pooled(model, sides[0]), _pooled(model, sides[1])


def _pooled(model: MatchingModel, side: Any) -> Tensor:
    if not isinstance(side, Tensor | Fragments):
        raise ValueError(
            f"model: expected one tensor or Fragments per side, but {model.name} encodes as {type(side).__name__}"
        )
    return (mean_pool(side) if isinstance(side, Fragments) else side).cpu()


def write_features(
    path: str | os.PathLike[str], features: Mapping[str, tuple[Tensor, Tensor]], *, by_model: bool = False
) -> None:
    """Plot images and captions of several models, each panel in a plane of its own.

    Args:
        path: figure to write, atomically; its suffix is one of `SUFFIXES`.
        features, by_model: as in `in_planes`.

    Raises:
        ValueError: the suffix is unknown, or scikit-learn is not installed.
    """
    check_suffix(path)
    draw_planes(path, in_planes(features, by_model=by_model))


def in_planes(features: Mapping[str, tuple[Tensor, Tensor]], *, by_model: bool = False) -> dict[str, dict[str, Tensor]]:
    """Return the panels of a figure by their titles: points (n, 2) by the names of the legend, placed by t-SNE.

    Args:
        features: embeddings of images (n, d) and captions (m, d) of each model, by its name.
        by_model: a panel for each model, with its images and captions, instead of a panel for the images of all models
            and one for their captions.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    panels = {side: {name: both[number] for name, both in features.items()} for number, side in enumerate(_SIDES)}
    if by_model:
        panels = {name: dict(zip(_SIDES, both, strict=True)) for name, both in features.items()}
    planes = {}
    for title, parts in panels.items():
        points = _in_plane(torch.cat(list(parts.values()))).split([len(part) for part in parts.values()])
        planes[title] = dict(zip(parts, points, strict=True))
    return planes


def draw_planes(path: str | os.PathLike[str], planes: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Draw a panel for each plane, with points by the names of the legend, which are the same in all of them.

    Args:
        path: figure to write, atomically; its suffix is one of `SUFFIXES`.
        planes: as `in_planes` returns them.

    Raises:
        ValueError: the suffix is unknown.
    """
    columns = min(len(planes), _COLUMNS)
    rows = math.ceil(len(planes) / columns)
    names = list(next(iter(planes.values())))
    with write_figure(path, names, size=(4.5 * columns, 4.2 * rows + 0.2), points=True) as figure:
        for place, (title, parts) in enumerate(planes.items(), start=1):
            axes = figure.add_subplot(rows, columns, place)
            for number, points in enumerate(parts.values()):
                axes.plot(points[:, 0], points[:, 1], **point_style(number))
            axes.set_title(shortened(printable(title), _MAX_NAME), loc="left", parse_math=False)
            # Distances on the page have no unit.
            axes.tick_params(length=0, labelbottom=False, labelleft=False)


def _in_plane(rows: Tensor) -> Tensor:
    """Place rows (n, d) in the plane by t-SNE: float (n, 2), the same for the same rows."""
    if bool((rows == rows[0]).all()):
        return torch.zeros(len(rows), 2)  # scikit-learn would divide by their spread.
    perplexity = min(_PERPLEXITY, (len(rows) - 1) / 3)
    descent = check_tsne()(perplexity=perplexity, init="pca", random_state=0, method="exact")
    return torch.from_numpy(descent.fit_transform(rows.numpy()))


def check_tsne() -> Any:
    """Return scikit-learn's class for t-SNE; ValueError without scikit-learn."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise ValueError(
            "figure: the package scikit-learn is not installed; install it with pip install 'itm_fast[tsne]'"
        ) from None
    return TSNE
