"""What a report shows, as plain data.

Inside: `Report`, `TextQuery`, `ImageQuery`, `Hit`, `WordAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

__all__ = ["Hit", "ImageQuery", "Report", "TextQuery", "WordAttention"]


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
    credits: where pictures and texts come from, for the foot of the page.
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
