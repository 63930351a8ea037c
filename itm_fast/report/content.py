"""The content of reports, as plain data.

Inside: `Report`, `TextQuery`, `ImageQuery`, `Hit`, `WordAttention`; `PairReport`, `PairDirection`;
`ScoreReport`, `MeasureTable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

__all__ = [
    "Hit", "ImageQuery", "MeasureTable", "PairDirection", "PairReport", "Report", "ScoreReport", "TextQuery",
    "WordAttention",
]  # fmt: skip


@attrs.frozen
class Hit:
    """A search result: `item` is an index into the report's pictures or captions, `rank` counts from 1."""

    item: int
    rank: int
    right: bool


@attrs.frozen
class TextQuery:
    """A caption and the pictures found for it, best first. If its own picture ranks lower, it is added at the end."""

    caption: str
    hits: Sequence[Hit]


@attrs.frozen
class ImageQuery:
    """A picture and the captions found for it, best first.

    If all own captions of the picture rank lower, the best of them is added at the end.
    """

    picture: int
    hits: Sequence[Hit]


@attrs.frozen(eq=False)
class WordAttention:
    """Attention of a caption's words over a picture: `weights` (n_words, rows, columns), one grid per word.

    If the regions have `boxes`, (n_regions, 4) as shares of the picture's sides, `weights` are (n_words, n_regions).
    """

    caption: str
    picture: int
    words: Sequence[str]
    weights: np.ndarray
    boxes: np.ndarray | None = None


@attrs.frozen(eq=False)
class Report:
    """The content of a report of a run.

    Attributes:
        title: heading of the page.
        lead: paragraph below the heading.
        pictures: pixels of the pictures that the queries show, uint8 (height, width, 3), by index.
        names: short description of each picture, by index.
        captions: text of each caption.
        text_queries: results of text-to-image search.
        image_queries: results of image-to-text search.
        attention: captions whose words are drawn over their pictures; may be empty.
        trained: summary of `recall_summary` for the trained model.
        untrained: the same for the untrained model; None: not known.
        metrics: lines of the run's log.
        facts: labels and values, in the order shown.
        n_images: number of images searched.
        n_captions: number of captions searched.
        split: name of the split searched.
        top: number of hits shown for each query; a hit of a lower rank is shown separately.
        credits: source and licence of pictures and texts, shown in the footer; empty: no footer.
        note: what the attention of the model means; empty: weights of a softmax.
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
    untrained: dict[str, float] | None
    metrics: Sequence[dict[str, Any]]
    facts: Sequence[tuple[str, str]]
    n_images: int
    n_captions: int
    split: str
    top: int
    credits: str
    note: str = ""


@attrs.frozen(eq=False)
class PairDirection:
    """One direction of attention on the page of a pair.

    Attributes:
        direction: "t2i" if words attend to regions, "i2t" if regions attend to words.
        attention: weights at each step, (n_queries, n_contexts); rows sum to one.
        temperatures: inverse temperature of each query at each step, (n_queries,).
        aggregation: weights at each step by the name of the aggregation, (n_queries,), or (1 + n_words,) with the pair
            as a whole first.
    """

    direction: str
    attention: Sequence[np.ndarray]
    temperatures: Sequence[np.ndarray]
    aggregation: Mapping[str, Sequence[np.ndarray]]


@attrs.frozen(eq=False)
class PairReport:
    """The content of the page of one image-caption pair.

    Attributes:
        title: heading of the page.
        caption: text of the caption.
        lead: paragraph below the heading.
        words: the caption's words.
        directions: one or both directions of attention.
        regions: numbers, from 0, of the regions whose attention over the words is shown, in this order.
        picture: pixels, uint8 (height, width, 3); the cells of `grid` are its regions. None: there are only features.
        grid: rows and columns of the regions, if they have no boxes.
        facts: labels and values, in the order shown.
        credits: source and licence of pictures and texts, shown in the footer; empty: no footer.
        boxes: (n_regions, 4), left, top, right and bottom edge of the regions as shares of the sides of the picture;
            None: they are the cells of `grid`.
        note: what the attention of the model means; empty: weights of a softmax.
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
    boxes: np.ndarray | None = None
    note: str = ""


@attrs.frozen
class MeasureTable:
    """A table of measures: its title, the titles of its columns, and its rows of texts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@attrs.frozen(eq=False)
class ScoreReport:
    """The content of the report of given scores.

    Attributes:
        title: heading of the page.
        lead: paragraph below the heading.
        warnings: what is suspicious about the scores.
        tables: the measures.
        pictures: pixels of the pictures that the queries show, uint8 (height, width, 3), by index; images without
            pictures are shown by name.
        names: short description of each image that the queries show, by index.
        captions: text of each caption.
        text_queries: captions whose own image ranks lowest, with the images found.
        image_queries: images whose best caption ranks lowest, with the captions found.
        top: number of hits shown for each query; a hit of a lower rank is shown separately.
        facts: labels and values, in the order shown.
        credits: source and licence of pictures and texts, shown in the footer; empty: no footer.
    """

    title: str
    lead: str
    warnings: Sequence[str]
    tables: Sequence[MeasureTable]
    pictures: dict[int, np.ndarray]
    names: dict[int, str]
    captions: Sequence[str]
    text_queries: Sequence[TextQuery]
    image_queries: Sequence[ImageQuery]
    top: int
    facts: Sequence[tuple[str, str]]
    credits: str
