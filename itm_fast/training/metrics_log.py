"""The JSON-lines log of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from itm_fast.files import atomic, regular
from itm_fast.files.documents import parse_json
from itm_fast.files.messages import shortened, shown

__all__ = ["MetricsLog", "read_metrics"]

# These must be numbers: they locate a line, or are plotted.
_NUMBERS = (
    "step", "epoch", "seconds", "loss", "lr", "rsum", "image_grad_norm", "hardest_gap", "i2t_hardest_share",
    "t2i_hardest_share", "hardest_distance", "image_cosine", "caption_cosine", "domain_risk",
)  # fmt: skip


# Larger numbers cannot be plotted.
_LARGEST = 1e100


class MetricsLog:
    """Append one JSON object per line to `metrics.jsonl`. Each line is flushed at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, **values: Any) -> None:
        with atomic.naming_full_disk(self.path), atomic.open_in_place(self.path, "ab") as file:
            file.write((json.dumps(values) + "\n").encode())

    def flush_to_disk(self) -> None:
        """Wait until the lines are on disk."""
        if self.path.exists():
            with atomic.naming_full_disk(self.path), atomic.open_in_place(self.path, "r+b") as file:
                os.fsync(file.fileno())

    @property
    def size(self) -> int:
        """Return the size of the log in bytes, as `truncate` takes it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def line_at(self, position: int) -> tuple[dict[str, Any], int] | None:
        """Return the line at byte `position` and the start of the next line; None if there is no complete line."""
        if position >= self.size:
            return None
        with regular.open_file(self.path) as file:
            file.seek(position)
            line = file.readline()
        try:
            values = parse_json(line) if line.endswith(b"\n") else None
        except ValueError:
            return None
        return (values, position + len(line)) if isinstance(values, dict) else None

    def truncate(self, size: int) -> None:
        """Cut the log to `size` bytes, and drop an incomplete last line."""
        if not self.path.exists():
            return
        with atomic.open_in_place(self.path, "r+b") as file:
            kept = file.read(min(size, self.size))
            file.truncate(kept.rfind(b"\n") + 1)


def read_metrics(path: str | os.PathLike[str], required: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the lines of a log as dictionaries of numbers and texts, except an incomplete last line.

    A full disk or a loss of power can leave such a line.

    Raises:
        ValueError: a line is damaged or lacks one of `required`; the message names file and line.
    """
    lines: list[dict[str, Any]] = []
    content = regular.read_bytes(path)
    texts = content.splitlines()
    for number, line in enumerate(texts, start=1):
        where = f"{path}: line {number}"
        try:
            values = parse_json(line)
        except ValueError as error:
            if number == len(texts) and line.startswith(b"{") and not content.endswith(b"\n"):
                break
            raise ValueError(f"{where}: expected JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected names and values, got {shown(values)}")
        for name, value in values.items():
            if not _fits(name, value):
                wanted = f"a number below {_LARGEST:g} in size" + ("" if name in _NUMBERS else " or a text")
                raise ValueError(f"{where}: {shortened(name)}: expected {wanted}, got {shown(value)}")
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"{where}: {missing[0]!r} is missing")
        lines.append(values)
    return lines


def _fits(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return name not in _NUMBERS
    return type(value) in (int, float) and abs(value) < (2**53 if type(value) is int else _LARGEST)
