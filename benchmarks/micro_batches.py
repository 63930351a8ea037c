"""Measures large batches that are encoded a micro-batch at a time, and prints the table.

python benchmarks/micro_batches.py --json benchmarks/results/micro_batches.json   # half an hour
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from itm_fast.benchmarking.micro_batches import SETUPS, markdown, run
from itm_fast.benchmarking.scenarios import Setup

QUICK = ((Setup("scan", batch=32, dim=64, features=64, words=500), (8,), 2),)


def main() -> None:
    parser = argparse.ArgumentParser(description="What large batches cost with micro-batches and without.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds, to see that it works")
    options = parser.parse_args()
    results = run(
        QUICK if options.quick else SETUPS,
        options.threads,
        progress=lambda what: print(what, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
