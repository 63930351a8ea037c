"""Measures what the training scenarios of Deep Boosting Learning cost, and prints the table.

python benchmarks/scenarios.py --json benchmarks/results/scenarios.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from itm_fast.benchmarking.scenarios import Setup, markdown, run


def main() -> None:
    parser = argparse.ArgumentParser(description="What the training scenarios cost beside ordinary training.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--runs", type=int, default=7, help="measured steps of each scenario (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds, to see that it works")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    options = parser.parse_args()
    small = {"batch": 16, "dim": 64, "features": 64, "words": 500} if options.quick else {}
    setups = [Setup("dbl", **small), Setup("scan", **small)]
    results = run(
        setups,
        options.threads,
        options.runs,
        memory=not options.no_memory,
        progress=lambda what: print(what, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
