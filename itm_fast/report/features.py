"""Features of several models in one plane, as FDF compares them (Figure 2a), by principal components.

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
    """The rows (n, d) by their first `count` principal components, (n, count), in float64.

    A component's sign is that which makes its entry of the largest size positive, so that figures repeat.
    """
    centred = rows.double() - rows.double().mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:count]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return centred @ (axes * largest.sign()).t()


def write_features(path: str | os.PathLike[str], features: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Draws images and captions of several models, each in the plane of the first two components of all of them.

    Args:
        path: figure to write, atomically; its suffix is one of `SUFFIXES`.
        features: images (n, d) and captions (m, d) of each model by the name that the legend shows.

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
