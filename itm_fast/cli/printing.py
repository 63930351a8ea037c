"""Text from files on its way to a terminal.

Inside: `printable`.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """`text` with characters that would steer a terminal written out, as in `\\x1b`."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
