"""What a report shows, as plain data.

Inside: `Report`, `TextQuery`, `ImageQuery`, `Hit`, `WordAttention`; `PairReport`, `PairDirection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

__all__ = ["Hit", "ImageQuery", "PairDirection", "PairReport", "Report", "TextQuery", "WordAttention"]


@attrs.frozen
class Hit:
    """One result: `item` is an index into the report's pictures or captions, `rank` counts from 1."""

    item: int
    rank: int
    right: bool


@attrs.frozen
class TextQuery:
    """A caption and the pictures found for it, best first; a right picture further down stands at the end."""

    caption: str
    hits: Sequence[Hit]


@attrs.frozen
class ImageQuery:
    """A picture and the captions found for it, best first; its best own caption stands at the end if further down."""

    picture: int
    hits: Sequence[Hit]


@attrs.frozen(eq=False)
class WordAttention:
    """A caption and where each of its words looks in a picture: weights (n_words, rows, columns), a grid for each."""

    caption: str
    picture: int
    words: Sequence[str]
    weights: np.ndarray


@attrs.frozen(eq=False)
class Report:
    """Everything that one report shows.

    pictures: index to uint8 (height, width, 3), for the pictures that the queries name; names: index to a short text.
    captions: index to text. trained, untrained: summaries of `recall_summary`. metrics: the lines of the run's log.
    facts: label and value, in the order shown. split: name of the split that was searched. top: hits shown of each
    query; one of a lower rank is set apart. attention: captions drawn over their pictures, word by word; may be empty.
    credits: source and licence of pictures and texts, for the foot of the page; none if empty.
    """

    title: str
    lead: str
    pictures: dict[int, np.ndarray]
    names: dict[int, str]
    captions: Sequence[str]
    text_queries: Sequence[TextQuery]
    image_queries: Sequence[ImageQuery]
    attention: Sequence[WordAttention]
    trained: dict[str, float]
    untrained: dict[str, float]
    metrics: Sequence[dict[str, Any]]
    facts: Sequence[tuple[str, str]]
    n_images: int
    n_captions: int
    split: str
    top: int
    credits: str


@attrs.frozen(eq=False)
class PairDirection:
    """What the page of a pair shows where words attend to regions ("t2i"), or regions to words ("i2t").

    attention: at each step (n_queries, n_contexts), rows sum to one. temperatures: at each step the inverse temperature
    of each query, (n_queries,). aggregation: the weights at each step by the name of what aggregates, (n_queries,) or
    (1 + n_words,) with the pair as a whole first.
    """

    direction: str
    attention: Sequence[np.ndarray]
    temperatures: Sequence[np.ndarray]
    aggregation: Mapping[str, Sequence[np.ndarray]]


@attrs.frozen(eq=False)
class PairReport:
    """Everything that the page of one pair of image and caption shows.

    words: the caption's words. directions: one or both. regions: numbers, from 0, of the regions whose attention over
    the words is shown, in this order. picture: uint8 (height, width, 3), whose regions are the squares of `grid`, its
    rows and columns; None where only the regions' features are known. facts: label and value, in the order shown.
    credits: source and licence of pictures and texts, for the foot of the page; none if empty.
    """

    title: str
    caption: str
    lead: str
    words: Sequence[str]
    directions: Sequence[PairDirection]
    regions: Sequence[int]
    picture: np.ndarray | None
    grid: tuple[int, int]
    facts: Sequence[tuple[str, str]]
    credits: str
