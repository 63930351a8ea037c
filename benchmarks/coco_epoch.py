"""Rehearses training at COCO's size on synthetic data, and prints where the time goes and what an epoch would take.

python benchmarks/coco_epoch.py --json benchmarks/results/coco_epoch.json            # a CPU: a quarter of an hour
python benchmarks/coco_epoch.py --plan full --device cuda --folder DIR --json FILE   # a GPU: 20 GB of disk in DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch

from itm_fast.benchmarking.coco_epoch import PLANS, run
from itm_fast.benchmarking.coco_table import markdown
from itm_fast.benchmarking.rehearsal import RECIPES
from itm_fast.files import write_text


def main() -> None:
    parser = argparse.ArgumentParser(description="What training at COCO's size takes.")
    parser.add_argument("--plan", choices=list(PLANS), default="cpu", help="how much is measured (default cpu)")
    parser.add_argument("--models", nargs="+", choices=list(RECIPES), metavar="NAME", help="of those that the plan has")
    parser.add_argument("--scale", type=float, help="share of COCO's images, in the place of the plan's")
    parser.add_argument("--device", default="cpu", help="where to train (default cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, help="write all figures there, after each model")
    parser.add_argument("--folder", type=Path, help="keep data and store there, or take those of an earlier call")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no model after so many seconds")
    options = parser.parse_args()
    plan = PLANS[options.plan]
    changes = {name: value for name in ("models", "scale") if (value := getattr(options, name)) is not None}
    if changes:
        plan = attrs.evolve(plan, **{**changes, **({"models": tuple(options.models)} if options.models else {})})

    def save(results: dict[str, Any]) -> None:
        results["environment"]["command"] = " ".join(["python", "benchmarks/coco_epoch.py", *sys.argv[1:]])
        if options.json is not None:
            write_text(options.json, json.dumps(results, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        results = run(
            plan,
            options.folder or Path(folder),
            options.device,
            options.threads or torch.get_num_threads(),
            progress=lambda what: print(what, file=sys.stderr, flush=True),
            save=save,
            limit_s=options.limit_s,
        )
    print(f"{len(results['models'])} models rehearsed" if results["dry_run"] else markdown(results))


if __name__ == "__main__":
    main()
