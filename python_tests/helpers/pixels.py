"""Stores of small pictures.

Inside: `write_pixels`.
"""

from __future__ import annotations

from pathlib import Path

from itm_fast import cli
from python_tests.helpers.pictures import write_captions, write_pictures


def write_pixels(folder: Path, *, size: int = 32, count: int = 48) -> Path:
    """Import emoji, two captions each, as a store of pictures of `size` pixels per side; return the store."""
    captions = write_captions(folder / "captions.csv", write_pictures(folder / "pictures", count))
    command = ["data", "import", "--images", folder / "pictures", "--captions", captions, "--out", folder / "store"]
    options = ["--size", size, "--grid", 4, "--split", "0.75,0.125,0.125", "--min-count", 1, "--workers", 0]
    assert cli.run([str(part) for part in (*command, *options)]) == 0
    return folder / "store"
