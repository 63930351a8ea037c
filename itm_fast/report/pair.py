"""Renders one pair of image and caption from the inside as one HTML file that needs nothing beside it.

Inside: `render_pair`, `write_pair`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from itm_fast import files
from itm_fast.report.content import PairReport
from itm_fast.report.heat import heat, peak
from itm_fast.report.page import png_uri, render

__all__ = ["render_pair", "write_pair"]

WHOLE = "picture and caption as a whole"

# What the weights of each kind of aggregation are.
_AGGREGATIONS = {
    "RAR": (
        "The words' similarities to what they attend to are gathered into one vector, which the score is read from. "
        "Each step weighs the words anew, led by the vector of the step before."
    ),
    "SGR": (
        "Picture and caption as a whole and each word are the nodes of a graph. In each round the node of the whole, "
        "which the score is read from in the end, gathers messages from all nodes with these weights."
    ),
    "SAF": "The similarities of picture and caption as a whole and of each word are summed up with these weights.",
}


def write_pair(path: str | os.PathLike[str], report: PairReport) -> None:
    """Writes the page of `report` as HTML, atomically."""
    files.write_text(path, render_pair(report))


def render_pair(report: PairReport) -> str:
    """The page. Weights stand in it as percentages with one decimal."""
    return render(
        "pair.html.j2",
        report=report,
        picture=None if report.picture is None else png_uri(report.picture),
        words=_words(report),
        tables=[_table(weights) for weights in report.attention],
        aggregations=[_aggregation(name, steps, report.words) for name, steps in report.aggregation.items()],
    )


def _percent(weight: float) -> str:
    return f"{100 * weight:.1f}"


def _words(report: PairReport) -> list[dict[str, Any]]:
    """Each word with its temperature and where it looks at each step, drawn over the picture where there is one."""
    drawn = []
    for index, word in enumerate(report.words):
        looks = []
        for weights, temperatures in zip(report.attention, report.temperatures, strict=True):
            look = {"temperature": f"{temperatures[index]:.1f}", "image": None}
            if report.picture is not None:
                cells = weights[index].reshape(report.grid)
                row, column, weight = peak(cells)
                rows, columns = report.grid
                look["image"] = png_uri(heat(report.picture, cells))
                look["where"] = f"{word}: most attention in row {row}, column {column} of {rows} x {columns}"
            else:
                region = int(weights[index].argmax())
                weight = float(weights[index][region])
                look["where"] = f"region {region + 1}"
            look["share"] = _percent(weight)
            looks.append(look)
        drawn.append({"word": word, "looks": looks})
    return drawn


def _table(weights: np.ndarray) -> list[list[tuple[str, int]]]:
    """For each word and region the weight in percent and how strongly its cell is tinted, 0 to 50."""
    tint = np.rint(50 * np.sqrt(weights / max(float(weights.max()), 1e-12))).astype(int)
    return [
        [(_percent(weight), int(share)) for weight, share in zip(row, shares, strict=True)]
        for row, shares in zip(weights, tint, strict=True)
    ]


def _aggregation(name: str, steps: Sequence[np.ndarray], words: Sequence[str]) -> dict[str, Any]:
    """The weights of each word at each step, with the length of their bars from 0 to 100."""
    labels = [WHOLE, *words] if len(steps[0]) == len(words) + 1 else list(words)
    longest = max(max(float(weights.max()) for weights in steps), 1e-12)
    rows = []
    for index, label in enumerate(labels):
        cells = [(_percent(weights[index]), round(100 * float(weights[index]) / longest)) for weights in steps]
        rows.append({"label": label, "cells": cells})
    return {"name": name, "lead": _AGGREGATIONS[name], "rows": rows, "steps": len(steps)}
