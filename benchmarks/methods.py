"""Measures what FDF and ADDR cost beside the training of their hosts, and prints the tables.

python benchmarks/methods.py --json benchmarks/results/methods.json   # 35 minutes, 10 GB of memory
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from itm_fast.benchmarking.method_steps import ADDR_HOSTS, FDF_HOSTS, of_batch, quick
from itm_fast.benchmarking.methods import run
from itm_fast.benchmarking.methods_table import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description="What FDF and ADDR cost beside ordinary training.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--batch", type=int, default=128, help="pairs of a batch (default 128)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a minute, to see that it works")
    options = parser.parse_args()
    fdf, addr = (
        {name: quick(host) if options.quick else of_batch(host, options.batch) for name, host in hosts.items()}
        for hosts in (FDF_HOSTS, ADDR_HOSTS)
    )
    command = f"python benchmarks/methods.py {'--quick' if options.quick else f'--batch {options.batch}'}"
    results = run(fdf, addr, command, progress=lambda what: print(what, flush=True))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
