"""Embeddings of several models in one plane by principal components, as in Figure 2a of FDF.

Inside: `principal_components`, `write_features`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from itm_fast.report.comparison import point_style, write_figure

__all__ = ["principal_components", "write_features"]


def principal_components(rows: Tensor, count: int = 2) -> Tensor:
    """Project rows onto their first principal components.

    The sign of a component is chosen so that its entry of the largest magnitude is positive; figures are reproducible.

    Args:
        rows: `(n, d)`.
        count: number of components.

    Returns:
        float64 `(n, count)`.
    """
    centred = rows.double() - rows.double().mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:count]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return centred @ (axes * largest.sign()).t()


def write_features(path: str | os.PathLike[str], features: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Plot the images and the captions of several models, each in the plane of the first two principal components.

    The components are those of all models together.

    Args:
        path: figure to write, atomically; its suffix is one of `SUFFIXES`.
        features: embeddings of images (n, d) and captions (m, d) of each model, by the name for the legend.

    Raises:
        ValueError: the suffix is unknown.
    """
    with write_figure(path, list(features), size=(9.0, 4.4), points=True) as figure:
        for side, (axes, title) in enumerate(zip(figure.subplots(1, 2), ("Images", "Captions"), strict=True)):
            parts = [both[side] for both in features.values()]
            plane = principal_components(torch.cat(parts)).split([len(part) for part in parts])
            for number, points in enumerate(plane):
                axes.plot(points[:, 0], points[:, 1], **point_style(number))
            axes.set_title(title, loc="left")
            axes.set_xlabel("first component")
            axes.set_ylabel("second component")
