"""Write the captions of Tux Paint's stamps: photos and drawings under GPL-2, each with a short English sentence.

    apt install tuxpaint-stamps-default
    python tools/stamps.py --out runs/stamps.csv
    itm-fast data import --images /usr/share/tuxpaint/stamps --captions runs/stamps.csv --skip-bad --out data/stamps

Stamps that are there as SVG only are left out. Stamps with the same sentence are in the same split: a tenth of the
sentences is dev, a fifth test. `--skip-bad` leaves out the pictures without a sentence, mirror images of others.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

import numpy as np

from itm_fast.files import atomic


def sentences(folder: Path) -> dict[str, str]:
    """Return the sentence of each stamp by the path of its picture in the folder; ValueError if there is none."""
    found = {}
    for path in sorted(folder.rglob("*.png")):
        # The first line is English, the others are translations.
        text = path.with_suffix(".txt")
        lines = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
        if lines and lines[0].strip():
            found[str(path.relative_to(folder))] = lines[0].strip()
    if not found:
        raise ValueError(f"{folder}: no stamps: PNG files with a text beside them")
    return found


def table(found: dict[str, str], seed: int) -> str:
    """Return the table that `itm-fast data import` reads."""
    different = sorted(set(found.values()))
    order = np.random.default_rng(seed).permutation(len(different))
    n_dev, n_test = len(different) // 10, len(different) // 5
    splits = ["dev"] * n_dev + ["test"] * n_test + ["train"] * (len(different) - n_dev - n_test)
    split_of = {different[index]: split for index, split in zip(order, splits, strict=True)}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("image", "caption", "split"))
    rows.writerows((image, sentence, split_of[sentence]) for image, sentence in found.items())
    return text.getvalue()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the captions of Tux Paint's stamps.")
    parser.add_argument("--stamps", type=Path, default=Path("/usr/share/tuxpaint/stamps"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/stamps.csv"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(options.out, table(sentences(options.stamps), options.seed))
    except (ValueError, OSError) as error:
        print(f"stamps: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
