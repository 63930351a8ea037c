"""Render search results as one self-contained HTML file.

Inside: `FoundItem`, `SearchPage`, `render_search`, `write_search`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence

import attrs

from itm_fast.files import atomic
from itm_fast.report.page import render

__all__ = ["FoundItem", "SearchPage", "render_search", "write_search"]


@attrs.frozen
class FoundItem:
    """A result on the page: rank from 1, score, id, captions, and a WebP file of its picture, if there is one."""

    rank: int
    score: float
    id: str
    captions: Sequence[str]
    thumbnail: bytes | None


@attrs.frozen
class SearchPage:
    """The content of a page of search results.

    Attributes:
        queries: each query with its results, best first.
        facts: labels and values, in the order shown.
    """

    queries: Sequence[tuple[str, Sequence[FoundItem]]]
    facts: Sequence[tuple[str, str]]


def write_search(path: str | os.PathLike[str], page: SearchPage) -> None:
    """Write the page as HTML, atomically."""
    atomic.write_text(path, render_search(page))


def render_search(page: SearchPage) -> str:
    """Return the page. The template engine escapes all texts."""
    pictures = {
        found.thumbnail: "data:image/webp;base64," + base64.b64encode(found.thumbnail).decode("ascii")
        for _, results in page.queries
        for found in results
        if found.thumbnail
    }
    return render("search.html.j2", page=page, pictures=pictures)
