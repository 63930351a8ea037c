"""Measure itm_fast beside other packages on the CPU: late-interaction scores, and recalls from embeddings.

    make rivals      # installs the packages of benchmarks/rivals.txt beside those of the project, and runs
    python -m benchmarks.rivals --json benchmarks/results/rivals.json

Inside: `run_recalls`, `run_scores`, `markdown`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.rival_recalls import EVALUATIONS, SLOW, RecallCase, exact_recalls, make_evaluation
from benchmarks.rival_scores import CASES, SCORERS, WITHOUT_GRADIENT, Case, exact_scores, make_call
from benchmarks.units import amount, seconds
from itm_fast.benchmarking.measure import interleave, peak_memory, reset_peak, status_bytes
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "markdown", "run_recalls", "run_scores"]

FORMAT_VERSION = 1
PACKAGES = ("sentence-transformers", "colpali-engine", "maxsim-cpu", "torchmetrics", "faiss-cpu")
RECALLS = RecallCase(images=5000, dim=256)
Progress = Callable[[str], None]


def run_scores(
    cases: Mapping[str, Case], scorers: Sequence[str], *, rounds: int, threads: int, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Time the scorers in turn, and measure the peak memory of each in a process of its own."""
    torch.set_num_threads(threads)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        able = [scorer for scorer in scorers if not (case.gradient and scorer in WITHOUT_GRADIENT)]
        exact = exact_scores(case)
        calls = {scorer: make_call(scorer, case) for scorer in able}
        progress(name)
        timings = interleave(calls, dict.fromkeys(able, rounds), progress=lambda scorer: progress(f"  {scorer}"))
        results[name] = {scorer: timing.as_dict() for scorer, timing in timings.items()}
        for scorer, found in results[name].items():
            found["largest_error"] = float((torch.as_tensor(calls[scorer]()).double() - exact).abs().max())
            found["peak_bytes"] = peak_memory(make_call, scorer, case, threads=threads)
    return results


def run_recalls(
    case: RecallCase, evaluations: Sequence[str], *, rounds: int, threads: int, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Run each evaluation in new processes, in turn: time, peak memory and recalls. Slow ones run once."""
    exact = exact_recalls(case)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in evaluations}
    for number in range(rounds):
        for name in evaluations:
            if number == 0 or name not in SLOW:
                progress(name)
                runs[name].append(_in_new_process(name, case, threads))
    return {
        name: {
            "runs_s": [one["seconds"] for one in found],
            "peak_bytes": max(one["peak_bytes"] for one in found),
            "largest_difference": max(
                abs(own - right) for one in found for own, right in zip(one["recalls"], exact, strict=True)
            ),
        }
        for name, found in runs.items()
    }


def _in_new_process(name: str, case: RecallCase, threads: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_evaluate, args=(sender, name, case, threads))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        raise RuntimeError(f"the process that measured '{name}' died; it may need more memory") from None
    finally:
        process.join()
    return found


def _evaluate(sender: Any, name: str, case: RecallCase, threads: int) -> None:
    torch.set_num_threads(threads)
    make_evaluation(name, case, small=True)()
    call = make_evaluation(name, case)
    reset_peak()
    before = status_bytes("VmRSS")
    start = time.perf_counter()
    recalls = call()
    seconds = time.perf_counter() - start
    sender.send({"seconds": seconds, "recalls": recalls, "peak_bytes": max(0, status_bytes("VmHWM") - before)})
    sender.close()


def markdown(results: Mapping[str, Any]) -> str:
    """Render a table of each case of scores and of the recalls, then where and how they were measured."""
    parts = []
    for name, found in results["scores"].items():
        case = Case(**results["cases"][name])
        error = f"largest error of a {'gradient' if case.gradient else 'score'}"
        parts.append(f"**{name[0].upper()}{name[1:]}**: {_described(case)}.")
        parts.append(_rows("scorer", found, error, lambda one: f"{one['largest_error']:.1e}"))
    images, dim = results["recall_case"]["images"], results["recall_case"]["dim"]
    parts.append(
        f"**Recalls**: R@1, R@5 and R@10 both ways from embeddings of {images:,} images and {5 * images:,} captions, "
        f"d = {dim}."
    )
    difference = "largest difference of a recall"
    parts.append(_rows("evaluation", results["recalls"], difference, lambda one: f"{one['largest_difference']:.3f}"))
    where, packages = results["environment"], results["packages"]
    rounds = max(len(one["runs_s"]) for one in results["recalls"].values())
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    parts.append(
        f"Measured on {where['date'][:10]} on {where['processor']}, {where['threads']} threads, "
        f"{where['instruction_set']}, torch {where['torch']}, {versions}; float32. Times are medians of interleaved "
        f"rounds, smallest and largest in brackets: {results['rounds']} for scores, after a warm-up, and {rounds} for "
        "recalls, in new processes. torchmetrics ran once. Speed is relative to the first row. Memory is the peak "
        "without the inputs. Errors are against float64; differences of recalls are in percentage points. "
        f"Load of the machine: {results['load_before']:.1f} before, {results['load_after']:.1f} after."
    )
    return "\n\n".join(parts) + "\n"


def _described(case: Case) -> str:
    def rows(limits: tuple[int, int]) -> str:
        return f"{limits[0]}" if limits[0] == limits[1] else f"{limits[0]} to {limits[1]:,}"

    return (
        f"{case.queries} sets of {rows(case.query_rows)} rows with {case.contexts} sets of {rows(case.context_rows)} "
        f"rows, d = {case.dim}"
    )


def _rows(kind: str, found: Mapping[str, Any], agreement: str, agrees: Callable[[Mapping[str, Any]], str]) -> str:
    base = statistics.median(next(iter(found.values()))["runs_s"])
    rows = [[kind, "time", "speed", "peak memory", agreement]]
    for name, one in found.items():
        runs = one["runs_s"]
        spread = f" [{seconds(min(runs))}, {seconds(max(runs))}]" if len(runs) > 1 else ""
        memory = "" if one["peak_bytes"] is None else amount(one["peak_bytes"], "B")
        middle = statistics.median(runs)
        rows.append([name, f"{seconds(middle)}{spread}", f"{base / middle:.2f}x", memory, agrees(one)])
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure itm_fast beside other packages on the CPU.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the scores; recalls have up to 3 (default 5)")
    parser.add_argument("--images", type=int, default=RECALLS.images, help="images of the recalls (default 5000)")
    options = parser.parse_args()
    try:
        packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        sys.exit(f"benchmarks.rivals: {error.name} is not installed; run make rivals")

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    load_before = os.getloadavg()[0]
    case = RecallCase(options.images, RECALLS.dim)
    scores = run_scores(CASES, list(SCORERS), rounds=options.rounds, threads=options.threads, progress=progress)
    recalls = run_recalls(
        case, list(EVALUATIONS), rounds=min(3, options.rounds), threads=options.threads, progress=progress
    )
    results = {
        "format_version": FORMAT_VERSION,
        "environment": environment(options.threads, build_info()),
        "packages": packages,
        "rounds": options.rounds,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "cases": {name: asdict(one) for name, one in CASES.items()},
        "scores": scores,
        "recall_case": asdict(case),
        "recalls": recalls,
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
