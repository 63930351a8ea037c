"""Runs FDF's cross-model realignment on the bundled data, and prints the cross table.

python benchmarks/realignment.py --json benchmarks/results/realignment.json --figure docs/images/fdf-realignment.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from itm_fast import files
from itm_fast.benchmarking.realignment import markdown, run


def main() -> None:
    parser = argparse.ArgumentParser(description="FDF's cross-model realignment on the bundled data: some minutes.")
    parser.add_argument("--out", type=Path, default=Path("runs/realignment"), help="folder for data and runs")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--figure", type=Path, help="figure of the features to write: .svg, .png or .pdf")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    options = parser.parse_args()
    for path in (options.json, options.figure):
        if path is not None:
            files.check_target(path)
    results = run(
        options.out, threads=options.threads, figure=options.figure, progress=lambda what: print(what, flush=True)
    )
    if options.json is not None:
        files.write_text(options.json, json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
