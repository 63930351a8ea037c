"""Render the intermediate results of one image-caption pair as one self-contained HTML file.

Inside: `render_pair`, `write_pair`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from itm_fast.files import atomic
from itm_fast.report.content import PairDirection, PairReport
from itm_fast.report.page import png_uri, render
from itm_fast.report.regions import BoxRegions, GridRegions

__all__ = ["render_pair", "write_pair"]

Regions = GridRegions | BoxRegions | None

WHOLE = "picture and caption as a whole"

# Exponent from a weight, relative to the largest, to its brightness, by direction.
_POWERS = {"t2i": 0.5, "i2t": 1.0}

# Explanation of the weights of each aggregation.
_RAR = (
    "The similarity vectors of the {queries} are combined with these weights into one vector, from which the score is "
    "computed. Each step computes new weights from the vector of the previous step."
)
_AGGREGATIONS = {
    "RAR": _RAR,
    "Pooling": "The {queries}, fused with their messages, are summed with these weights.",
    "SGR": (
        "The nodes of a graph are the words and picture and caption as a whole. The score is computed from the node "
        "of the whole, which combines messages from all nodes with these weights in each step."
    ),
    "SAF": "The similarity vectors of the words and of picture and caption as a whole are summed with these weights.",
}


def write_pair(path: str | os.PathLike[str], report: PairReport) -> None:
    """Write the page of `report` as HTML, atomically."""
    atomic.write_text(path, render_pair(report))


def render_pair(report: PairReport) -> str:
    """Return the page. Weights are percentages with one decimal."""
    attention = report.directions[0]
    count = attention.attention[0].shape[1 if attention.direction == "t2i" else 0]
    regions: Regions = None
    if report.picture is not None and report.boxes is not None:
        regions = BoxRegions(report.picture, report.boxes)
    elif report.picture is not None:
        regions = GridRegions(report.picture, report.grid, count)
    return render(
        "pair.html.j2",
        report=report,
        picture=None if regions is None else png_uri(regions.shown),
        boxes=isinstance(regions, BoxRegions),
        directions=[_direction(report, regions, part) for part in report.directions],
    )


def _percent(weight: float) -> str:
    return f"{100 * weight:.1f}"


def _direction(report: PairReport, places: Regions, part: PairDirection) -> dict[str, Any]:
    """Return the values of one direction for the template."""
    of_words = part.direction == "t2i"
    count = part.attention[0].shape[1 if of_words else 0]
    regions = [_region(places, number) for number in range(count)]
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
        "cards": _word_cards(report, places, part) if of_words else _shares_of_words(report, places, part),
        "contexts": [region["number"] for region in regions] if of_words else report.words,
        "tables": tables,
        "aggregations": [_aggregation(places, part, name, queries) for name in part.aggregation],
    }


def _region(places: Regions, number: int) -> dict[str, Any]:
    """Return the name of a region, counted from 1, and its pixels if there is a picture."""
    name, pixels = (f"region {number + 1}", None) if places is None else places.described(number)
    return {"number": number + 1, "name": name, "image": None if pixels is None else png_uri(pixels)}


def _over_picture(places: GridRegions | BoxRegions, weights: np.ndarray, what: str, **scale: float) -> dict[str, Any]:
    """Light the picture by the weights of the regions (n_regions,); return it with the strongest region."""
    pixels, place, weight = places.lit(weights, **scale)
    return {"image": png_uri(pixels), "where": f"{what} in {place}", "place": place, "share": _percent(weight)}


def _word_cards(report: PairReport, places: Regions, part: PairDirection) -> list[dict[str, Any]]:
    """Return the temperature and attention of each word at each step, drawn over the picture if there is one."""
    drawn = []
    for index, word in enumerate(report.words):
        looks = []
        for weights, temperatures in zip(part.attention, part.temperatures, strict=True):
            if places is not None:
                look = _over_picture(places, weights[index], f"{word}: most attention")
            else:
                region = int(weights[index].argmax())
                look = {"image": None, "where": f"region {region + 1}", "share": _percent(weights[index][region])}
            looks.append({**look, "temperature": f"{temperatures[index]:.1f}"})
        drawn.append({"word": word, "looks": looks})
    return drawn


def _shares_of_words(report: PairReport, places: Regions, part: PairDirection) -> list[dict[str, Any]]:
    """Return, for each word, the attention that it gets from every region, drawn over the picture if there is one.

    All pictures of a step have one scale: full brightness is the largest weight of the step. The scale is linear,
    because weights over words vary less than weights over regions.
    """
    if places is None:
        return []
    return [
        {
            "word": word,
            "looks": [
                {
                    **_over_picture(
                        places,
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
    """Return, for each query shown, the weights in percent and the tint of their cells, 0 to 50."""
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


def _aggregation(places: Regions, part: PairDirection, name: str, queries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the weights of each query at each step with bar lengths, 0 to 100; also draw those of regions."""
    steps = part.aggregation[name]
    of_words = part.direction == "t2i"
    labels = [{"name": WHOLE, "image": None}, *queries] if len(steps[0]) == len(queries) + 1 else list(queries)
    longest = max(max(float(weights.max()) for weights in steps), 1e-12)
    rows = []
    for index, label in enumerate(labels):
        cells = [(_percent(weights[index]), round(100 * float(weights[index]) / longest)) for weights in steps]
        rows.append({"query": label, "cells": cells})
    drawn = None if of_words else places
    return {
        "name": name,
        "lead": _AGGREGATIONS[name].format(queries="words" if of_words else "regions"),
        "rows": rows,
        "steps": len(steps),
        "maps": [] if drawn is None else [_over_picture(drawn, weights, "largest weight") for weights in steps],
    }
