"""Find items by a text such as their id, also among millions of them.

Inside: `Lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from itm_fast.search.segments import Segment

__all__ = ["Lookup"]

# Items that are hashed at a time.
_PART = 2**16


class Lookup:
    """The positions of items by one of their texts: 16 bytes per item, where a dictionary would take 200.

    Texts are compared by 64-bit hashes first, and then by themselves. The hash of bytes `b` is the sum of
    `(b[i] + 1) * w[i]` modulo 2^64, with random weights `w` that a file cannot foresee.

    Args:
        segments: the segments of a side.
        column: the text: "ids" or "owners".
        live: bool (positions,), True for the items to find.

    Raises:
        ValueError: the column is damaged. The message names the file.
    """

    def __init__(self, segments: Sequence[Segment], column: str, live: Tensor) -> None:
        self._segments, self._column = list(segments), column
        self._firsts = np.cumsum([0, *map(len, self._segments)])
        longest = 0
        for segment in self._segments:
            lengths = segment.stored[f"{column}.ends"].diff()
            if bool((lengths < 0).any()):
                raise ValueError(f"{segment.record.file}: damaged: {column}.ends")
            longest = max(longest, int(lengths.max()))
        self._weights = np.random.default_rng().integers(1, 2**64, longest, dtype=np.uint64)
        hashes = [self._hashes(segment, first) for segment in self._segments for first in range(0, len(segment), _PART)]
        found = live.nonzero().squeeze(1).numpy()
        own = np.concatenate(hashes)[found] if hashes else np.zeros(0, np.uint64)
        order = own.argsort(kind="stable")
        self._sorted, self._positions = own[order], found[order]

    def _hashes(self, segment: Segment, first: int) -> np.ndarray:
        ends = segment.stored[f"{self._column}.ends"][first : first + _PART + 1].numpy()
        content = segment.stored[self._column][int(ends[0]) : int(ends[-1])].numpy()
        starts = ends[:-1] - ends[0]
        place = np.arange(len(content)) - np.repeat(starts, np.diff(ends))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(self._terms(content, self._weights[place]))])
        found: np.ndarray = sums[ends[1:] - ends[0]] - sums[starts]
        return found

    @staticmethod
    def _terms(content: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (content.astype(np.uint64) + np.uint64(1)) * weights

    def positions(self, text: str) -> list[int]:
        """Return the positions of the live items with this text, in ascending order."""
        try:
            content = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        except UnicodeEncodeError:
            return []
        if len(content) > len(self._weights):
            return []
        wanted = self._terms(content, self._weights[: len(content)]).sum(dtype=np.uint64)
        first, last = (int(np.searchsorted(self._sorted, wanted, side)) for side in ("left", "right"))
        return [place for place in self._positions[first:last].tolist() if self._text(place) == text]

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and bool(self.positions(text))

    def repeated(self) -> str | None:
        """Return a text that several live items have, or None."""
        for place in (self._sorted[1:] == self._sorted[:-1]).nonzero()[0].tolist():
            text = self._text(int(self._positions[place]))
            if len(self.positions(text)) > 1:
                return text
        return None

    def _text(self, position: int) -> str:
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return self._segments[number].text(self._column, position - int(self._firsts[number]))
