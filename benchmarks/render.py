"""Writes the benchmark tables of the README from the committed results, or checks that they are up to date.

    python benchmarks/render.py            # rewrites README.md
    python benchmarks/render.py --check    # exit status 1 where README.md differs from the results

A missing result file is an error: no figure stands in the README that was not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from itm_fast.benchmarking.table import markdown

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def demo(result: dict[str, Any]) -> str:
    """What one run of the demo came to, as one sentence."""
    environment, trained = result["environment"], result["trained"]
    return (
        f"`{environment['command']}` on {environment['processor']} with {environment['threads']} threads, "
        f"{environment['date'][:10]}, at {environment['commit'][:12]}: {result['seconds']:.0f} s of training, then R@1 "
        f"{trained['i2t_r1']:.1f} (image to text) and {trained['t2i_r1']:.1f} (text to image) over {result['images']} "
        f"unseen pictures, sum of recalls {trained['rsum']:.1f} (untrained {result['untrained']['rsum']:.1f}).\n"
    )


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {"cpu": markdown, "demo": demo}


def rendered(text: str) -> str:
    """`text` with everything between the markers of each result replaced by its table."""
    for name, table in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        begin, end = f"<!-- benchmark {name} -->\n", f"<!-- end of benchmark {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{README.name}: expected the lines '{begin.strip()}' and '{end}'")
        if not path.exists():
            raise SystemExit(
                f"{path.relative_to(ROOT)} is missing: measure with 'make bench ARGS=\"--json {path.name}\"'"
            )
        text = f"{head}{begin}{table(json.loads(path.read_text()))}{end}{tail}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the benchmark tables of the README.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the README is out of date")
    options = parser.parse_args()
    present = README.read_text()
    wanted = rendered(present)
    if options.check and present != wanted:
        sys.exit("README.md is out of date: run python benchmarks/render.py")
    if not options.check:
        README.write_text(wanted)


if __name__ == "__main__":
    main()
