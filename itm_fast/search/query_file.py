"""Read queries or ids from a text file.

Inside: `read_lines`.
"""

from __future__ import annotations

import os

from itm_fast.files.documents import read_text

__all__ = ["read_lines"]

_MAX_BYTES = 64 * 2**20


def read_lines(path: str | os.PathLike[str]) -> dict[int, str]:
    """Return the lines of a UTF-8 file that are not blank by their numbers from 1, without blanks at their ends.

    Raises:
        ValueError: the file is missing, too large, no text, or has only blank lines. The message names it.
    """
    try:
        text = read_text(path, _MAX_BYTES, "utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    # Only "\n" and "\r\n" end a line: str.splitlines() also splits at separators that occur inside queries and ids.
    lines = {number: line.strip() for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{path}: expected at least one line that is not blank")
    return lines
