"""Benchmark steps of RCAR against those of a former commit: one process per run, in turn.

git worktree add ../former 97207c64    # the last commit whose backward of the regulators is PyTorch
cd ../former && python setup.py build_ext --inplace && cd -
python -m benchmarks.regulated_former ../former --json benchmarks/results/regulated_former.json   # half an hour
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.units import commit_of
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["markdown", "run"]

ROOT = Path(__file__).resolve().parents[1]
FORMS = ("scores", "hardest", "all")

# Runs in both checkouts, so it only uses what both have.
_CHILD = """
import json, sys, time
import torch
from itm_fast.benchmarking import regulated, workloads
from itm_fast.benchmarking.measure import reset_peak, status_bytes

form, batch, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def make(sizes):
    if form == "scores":
        return regulated.make_regulated_scores("native", sizes)
    weights = regulated.parameters(sizes)
    score = lambda words, regions: regulated.SCORES["native"](words, regions, weights)
    return workloads.step_of("native", score, workloads.inputs(sizes), weights.tensors(), form)

sizes = workloads.Sizes(batch, batch, dim)
make(workloads.warm_up_sizes("native", sizes))()
call = make(sizes)
reset_peak()
before, start = status_bytes("VmRSS"), time.process_time()
call()
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "peak_bytes": status_bytes("VmHWM") - before}))
"""


def measure(checkout: Path, form: str, batch: int, dim: int) -> dict[str, float]:
    """Return processor time and peak memory above the inputs of one call, in a new process with one thread.

    Args:
        checkout: a source tree of itm_fast with its built libraries.
        form: "scores", or the negatives of the loss of a step: "hardest" or "all".
    """
    command = [sys.executable, "-c", _CHILD, form, str(batch), str(dim)]
    ran = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(ran.stdout)


def run(
    former: Path, *, rounds: int, batch: int, dim: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure scores and steps of both checkouts in turn."""
    load_before = os.getloadavg()[0]
    measured: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {form: [] for form in FORMS} for name in ("former", "present")
    }
    for number in range(rounds):
        for form in FORMS:
            for name, checkout in (("former", former), ("present", ROOT)):
                progress(f"round {number + 1} of {rounds}: {name} {form}")
                measured[name][form].append(measure(checkout, form, batch, dim))
    commit = ["git", "-C", str(former), "rev-parse", "HEAD"]
    return {
        "format_version": 1,
        "environment": environment(1, build_info()),
        "former_commit": subprocess.run(commit, stdout=subprocess.PIPE, check=True, text=True).stdout.strip(),
        "pairs": [batch, batch],
        "dim": dim,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "measured": measured,
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Render time, multiple of the forward and memory of both, and the ratio of the times."""
    where = results["environment"]
    seconds = {
        name: {form: [one["seconds"] for one in runs] for form, runs in forms.items()}
        for name, forms in results["measured"].items()
    }
    rows = [["RCAR t2i, 2 RAR and 1 RCR", "before", "forwards", "memory", "now", "forwards", "memory", "ratio"]]
    titles = {"scores": "forward", "hardest": "step, hardest negatives", "all": "step, all negatives"}
    for form, title in titles.items():
        cells = []
        for name in ("former", "present"):
            times = seconds[name][form]
            peak = max(one["peak_bytes"] for one in results["measured"][name][form])
            cells += [
                f"{statistics.median(times):.2f} s [{min(times):.2f}, {max(times):.2f}]",
                f"{statistics.median(times) / statistics.median(seconds[name]['scores']):.2f}",
                f"{peak / 1e6:.0f} MB",
            ]
        pairs = zip(seconds["former"][form], seconds["present"][form], strict=True)
        rows.append([title, *cells, f"{statistics.median(before / now for before, now in pairs):.2f}"])
    captions, images = results["pairs"]
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at {commit_of(where)}, before: "
        f"{results['former_commit'][:12]}. {where['processor']}, 1 thread, {where['instruction_set']}, torch "
        f"{where['torch']}, float32, {captions} x {images} pairs, d = {results['dim']}, m = 256. Each of "
        f"{len(seconds['present']['all'])} runs is a new process, in turn before and now; medians in processor time, "
        "smallest and largest in brackets, and the median ratio of such a pair. Memory is the largest peak above the "
        f"inputs. Load of the machine: {results['load_before']:.1f} before, {results['load_after']:.1f} after.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark steps of RCAR against a former commit.")
    parser.add_argument("former", type=Path, help="a built checkout of the former commit")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--batch", type=int, default=128, help="images and captions (default 128)")
    parser.add_argument("--dim", type=int, default=1024, help="width of rows (default 1024)")
    options = parser.parse_args()
    results = run(
        options.former,
        rounds=options.rounds,
        batch=options.batch,
        dim=options.dim,
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
