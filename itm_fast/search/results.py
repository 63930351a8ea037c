"""What a search returns, as plain data.

Inside: `Item`, `Hit`, `Results`.
"""

from __future__ import annotations

import attrs

__all__ = ["Hit", "Item", "Results"]


@attrs.frozen
class Item:
    """An item of an index.

    Attributes:
        id: its name, unique among the images or among the captions of the index.
        side: "images" or "captions".
        captions: the captions of an image, or the text of a caption; may be empty.
        picture: path of the picture file of an image; empty if there is none.
        image: for a caption, the id of its image; empty if it has none.
    """

    id: str
    side: str
    captions: tuple[str, ...] = ()
    picture: str = ""
    image: str = ""


@attrs.frozen
class Hit:
    """A result.

    Attributes:
        rank: counts from 1.
        score: the model's score of the query with `item`.
        item: the item.
        service: address of the service that holds the item, if several were asked; else empty.
    """

    rank: int
    score: float
    item: Item
    service: str = ""


@attrs.frozen
class Results:
    """The results of one query, best first.

    Attributes:
        query: the text, or the name of the picture or the item.
        hits: at most k results.
        scored: the number of items that the model scored: the candidates of the first stage, or all items.
        unknown: the words of the text that the vocabulary of the first model lacks; empty for other queries.
    """

    query: str
    hits: tuple[Hit, ...]
    scored: int
    unknown: tuple[str, ...] = ()
