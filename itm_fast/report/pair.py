"""Renders one pair of image and caption from the inside as one HTML file that needs nothing beside it.

Inside: `render_pair`, `write_pair`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from itm_fast.files import atomic
from itm_fast.report.content import PairDirection, PairReport
from itm_fast.report.heat import heat, peak
from itm_fast.report.page import png_uri, render

__all__ = ["render_pair", "write_pair"]

WHOLE = "picture and caption as a whole"

# Of a weight's share of the largest: how strongly it is drawn in each direction.
_POWERS = {"t2i": 0.5, "i2t": 1.0}

# What the weights of each kind of aggregation are; those of RAR are the queries'.
_RAR = (
    "The similarities of the {queries} to what they attend to are gathered into one vector, which the score is read "
    "from. Each step weighs the {queries} anew, led by the vector of the step before."
)
_AGGREGATIONS = {
    "RAR": _RAR,
    "SGR": (
        "Picture and caption as a whole and each word are the nodes of a graph. In each round the node of the whole, "
        "which the score is read from in the end, gathers messages from all nodes with these weights."
    ),
    "SAF": "The similarities of picture and caption as a whole and of each word are summed up with these weights.",
}


def write_pair(path: str | os.PathLike[str], report: PairReport) -> None:
    """Writes the page of `report` as HTML, atomically."""
    atomic.write_text(path, render_pair(report))


def render_pair(report: PairReport) -> str:
    """The page. Weights stand in it as percentages with one decimal."""
    return render(
        "pair.html.j2",
        report=report,
        picture=None if report.picture is None else png_uri(report.picture),
        directions=[_direction(report, part) for part in report.directions],
    )


def _percent(weight: float) -> str:
    return f"{100 * weight:.1f}"


def _direction(report: PairReport, part: PairDirection) -> dict[str, Any]:
    """What the template shows of one direction."""
    of_words = part.direction == "t2i"
    regions = [_region(report, number) for number in range(part.attention[0].shape[1 if of_words else 0])]
    queries = [{"name": word, "image": None} for word in report.words] if of_words else regions
    shown = range(len(queries)) if of_words else report.regions
    tables = [
        _table(weights, temperatures, [(index, queries[index]) for index in shown], _POWERS[part.direction])
        for weights, temperatures in zip(part.attention, part.temperatures, strict=True)
    ]
    return {
        "of_words": of_words,
        "queries": "words" if of_words else "regions",
        "steps": len(part.attention),
        "cards": _word_cards(report, part) if of_words else _shares_of_words(report, part),
        "contexts": [region["number"] for region in regions] if of_words else report.words,
        "tables": tables,
        "aggregations": [_aggregation(report, part, name, queries) for name in part.aggregation],
    }


def _region(report: PairReport, number: int) -> dict[str, Any]:
    """What a region is called, counted from 1, and what is seen in it where there is a picture."""
    region: dict[str, Any] = {"number": number + 1, "name": f"region {number + 1}", "image": None}
    if report.picture is not None:
        rows, columns = report.grid
        row, column = divmod(number, columns)
        height, width = report.picture.shape[0] // rows, report.picture.shape[1] // columns
        patch = report.picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
        region["name"] = f"row {row + 1}, column {column + 1}"
        region["image"] = png_uri(patch)
    return region


def _over_picture(report: PairReport, weights: np.ndarray, what: str, **scale: float) -> dict[str, Any]:
    """The weights of the regions (n_regions,) as light on the picture, and where it is brightest."""
    assert report.picture is not None
    cells = weights.reshape(report.grid)
    row, column, weight = peak(cells)
    rows, columns = report.grid
    where = f"{what} in row {row}, column {column} of {rows} x {columns}"
    return {"image": png_uri(heat(report.picture, cells, **scale)), "where": where, "share": _percent(weight)}


def _word_cards(report: PairReport, part: PairDirection) -> list[dict[str, Any]]:
    """Each word with its temperature and where it looks at each step, drawn over the picture where there is one."""
    drawn = []
    for index, word in enumerate(report.words):
        looks = []
        for weights, temperatures in zip(part.attention, part.temperatures, strict=True):
            if report.picture is not None:
                look = _over_picture(report, weights[index], f"{word}: most attention")
            else:
                region = int(weights[index].argmax())
                look = {"image": None, "where": f"region {region + 1}", "share": _percent(weights[index][region])}
            looks.append({**look, "temperature": f"{temperatures[index]:.1f}"})
        drawn.append({"word": word, "looks": looks})
    return drawn


def _shares_of_words(report: PairReport, part: PairDirection) -> list[dict[str, Any]]:
    """For each word the share that it has of the attention of every region, over the picture where there is one.

    The pictures of a step have one scale: what is brightest in them is the largest share that any word has. Words are
    fewer than regions, and their shares less different.
    """
    if report.picture is None:
        return []
    return [
        {
            "word": word,
            "looks": [
                {
                    **_over_picture(
                        report,
                        weights[:, index],
                        f"{word}: looked at most",
                        largest=float(weights.max()),
                        power=_POWERS["i2t"],
                    ),
                    "temperature": None,
                }
                for weights in part.attention
            ],
        }
        for index, word in enumerate(report.words)
    ]


def _table(
    weights: np.ndarray, temperatures: np.ndarray, queries: Sequence[tuple[int, dict[str, Any]]], power: float
) -> list[dict[str, Any]]:
    """For each query that is shown the weights in percent and how strongly their cells are tinted, 0 to 50."""
    tint = np.rint(50 * (weights / max(float(weights.max()), 1e-12)) ** power).astype(int)
    return [
        {
            "query": query,
            "temperature": f"{temperatures[index]:.1f}",
            "cells": [
                (_percent(weight), int(share)) for weight, share in zip(weights[index], tint[index], strict=True)
            ],
        }
        for index, query in queries
    ]


def _aggregation(
    report: PairReport, part: PairDirection, name: str, queries: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The weights of each query at each step with the length of their bars, 0 to 100, and regions' on the picture."""
    steps = part.aggregation[name]
    of_words = part.direction == "t2i"
    labels = [{"name": WHOLE, "image": None}, *queries] if len(steps[0]) == len(queries) + 1 else list(queries)
    longest = max(max(float(weights.max()) for weights in steps), 1e-12)
    rows = []
    for index, label in enumerate(labels):
        cells = [(_percent(weights[index]), round(100 * float(weights[index]) / longest)) for weights in steps]
        rows.append({"query": label, "cells": cells})
    drawn = not of_words and report.picture is not None
    return {
        "name": name,
        "lead": _AGGREGATIONS[name].format(queries="words" if of_words else "regions"),
        "rows": rows,
        "steps": len(steps),
        "maps": [_over_picture(report, weights, "largest weight") for weights in steps] if drawn else [],
    }
