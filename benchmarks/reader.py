"""Measures the reader of feature stores on synthetic data, and prints the tables.

python benchmarks/reader.py --json benchmarks/results/reader.json   # some minutes, 1 GB of disk
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from itm_fast.benchmarking.reader import markdown, run


def main() -> None:
    parser = argparse.ArgumentParser(description="What reading batches of features costs.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, help="folder of a disk to measure on (default: that of temporary files)")
    parser.add_argument("--scale", type=float, default=0.01, help="share of COCO's images (default 0.01: 0.4 GB)")
    parser.add_argument("--batches", type=int, default=24, help="batches of a pass (default 24)")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each kind (default 15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run(
            Path(folder),
            scale=options.scale,
            batches=options.batches,
            rounds=options.rounds,
            progress=lambda what: print(what, file=sys.stderr, flush=True),
        )
    results["environment"]["command"] = " ".join(["python", "benchmarks/reader.py", *sys.argv[1:]])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
