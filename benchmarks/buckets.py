"""Measures what batches of captions of like length gain, in whole steps of two models, and prints the table.

python benchmarks/buckets.py --threads 1 --json benchmarks/results/buckets.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from itm_fast.benchmarking.buckets import markdown, run


def main() -> None:
    parser = argparse.ArgumentParser(description="What batches of captions of like length gain.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--batches", type=int, default=3, help="steps of a round for each size (default 3)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        results = run(
            Path(folder),
            scale=0.01,
            batch=128,
            batches=options.batches,
            rounds=options.rounds,
            progress=lambda what: print(what, file=sys.stderr, flush=True),
        )
    results["environment"]["command"] = " ".join(["python", "benchmarks/buckets.py", *sys.argv[1:]])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
