"""The JSON-lines log of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from itm_fast import files

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """Appends one JSON object per line to `metrics.jsonl`; each line is flushed as it is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, **values: Any) -> None:
        with files.naming_full_disk(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def flush_to_disk(self) -> None:
        """Waits until what was written would survive a power cut."""
        if self.path.exists():
            with files.naming_full_disk(self.path), self.path.open("rb+") as file:
                os.fsync(file.fileno())

    @property
    def size(self) -> int:
        """Bytes written so far: what `truncate` takes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def line_at(self, position: int) -> tuple[dict[str, Any], int] | None:
        """The line that starts at byte `position`, and where the next one starts; None where none is whole."""
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            file.seek(position)
            line = file.readline()
        try:
            values = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None
        return (values, position + len(line)) if isinstance(values, dict) else None

    def truncate(self, size: int) -> None:
        """Drops what was logged after the state that a run resumes from."""
        if self.size > size:
            os.truncate(self.path, size)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a log as dictionaries; ValueError naming file and line where one is not JSON."""
    lines = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: expected JSON: {error}") from None
    return lines
