"""Measures the store of ADDR's discriminators: bytes, and CPU time of a batch and of a save, and prints the table.

python benchmarks/discriminators.py --json benchmarks/results/discriminators.json   # about a minute, 3 GB of disk
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from itm_fast.benchmarking.discriminators import markdown, run


def main() -> None:
    parser = argparse.ArgumentParser(description="What the discriminators of ADDR cost beside the model.")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--images", type=int, default=113_287, help="training images (default: COCO's 113,287)")
    parser.add_argument("--width", type=int, default=1024, help="width of the fragments (default 1024)")
    parser.add_argument("--batch", type=int, default=128, help="distinct images of a batch (default 128)")
    parser.add_argument("--steps", type=int, default=200, help="measured batches (default 200)")
    parser.add_argument("--folder", help="where the files lie (default: the system's folder for temporary files)")
    options = parser.parse_args()
    results = run(options.images, options.width, options.batch, options.steps, options.folder)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
