"""Report phrases that make prose hard to read, in documents, docstrings, comments and messages.

    python tools/check_prose.py FILE ...

The phrases stand in tools/phrases.txt. In Python files, strings and comments are read; in C++ and CUDA files, comments
and strings; elsewhere, everything. The exit status is 1 if anything was found.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = Path(__file__).with_name("phrases.txt")
_CPP = (".h", ".cpp", ".cu", ".cuh")
_CPP_PROSE = re.compile(r'//[^\n]*(?:\n\s*//[^\n]*)*|"(?:[^"\\\n]|\\.)*"')
_PYTHON_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """The patterns and the advice for each. Spaces in a pattern match line breaks and comment marks, too."""
    lines = [line for line in PHRASES.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" => ") for line in lines]
    blank = r"\s+(?:(?://|#)\s*)?"
    return [(re.compile(pattern.replace(" ", blank), re.IGNORECASE), advice) for pattern, advice in pairs]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of prose in a file, with the number of their first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in _CPP:
        for found in _CPP_PROSE.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, found.group()
    elif path.suffix == ".py":
        comment: list[str] = []
        first = 0
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    first = first if comment else token.start[0]
                    comment.append(token.string)
                elif token.type in _PYTHON_PROSE:
                    yield token.start[0], token.string
                elif comment and token.type not in (tokenize.NL, tokenize.NEWLINE):
                    yield first, "\n".join(comment)
                    comment = []
    else:
        yield 1, text


def check(path: Path) -> Iterator[str]:
    """A line for each phrase found in a file."""
    known = phrases()
    for first, text in prose(path):
        for pattern, advice in known:
            for found in pattern.finditer(text):
                line = first + text.count("\n", 0, found.start())
                yield f"{path}:{line}: {' '.join(found.group().split())!r}: write {advice}"


def main(arguments: list[str]) -> int:
    found = [line for name in arguments for line in check(Path(name))]
    print("\n".join(found), end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
