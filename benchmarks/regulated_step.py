"""Benchmark training steps of RCAR by the negatives of the loss: the native backward against packed PyTorch.

python -m benchmarks.regulated_step --threads 2 --json benchmarks/results/regulated_step.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import processor_time
from benchmarks.units import commit_of
from itm_fast.benchmarking import regulated, workloads
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.table import table
from itm_fast.benchmarking.workloads import Sizes
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "markdown", "run"]

FORMAT_VERSION = 1
FORMS = ("native", "packed")
MININGS = ("hardest", "all")


def make_step(form: str, sizes: Sizes, mining: str, small: bool = False) -> Callable[[], tuple[Tensor, ...]]:
    """Scores, triplet loss and backward to the gradients of words, regions and every weight."""
    weights = regulated.parameters(sizes)
    sides = workloads.inputs(workloads.warm_up_sizes(form, sizes) if small else sizes)
    return workloads.step_of(form, lambda w, r: regulated.SCORES[form](w, r, weights), sides, weights.tensors(), mining)


def gradient_errors(sizes: Sizes) -> dict[str, float]:
    """Return the largest relative error of each form's gradients against float64, if all pairs have a gradient."""
    generator = torch.Generator().manual_seed(0)
    incoming = torch.randn(sizes.captions, sizes.images, generator=generator)

    def gradients(form: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        words, regions = (side.to(dtype) for side in workloads.inputs(sizes))
        weights = regulated.parameters(sizes).to(dtype)
        leaves = [t.detach().requires_grad_() for t in (words.values, regions.values, *weights.tensors())]
        given = words.with_values(leaves[0]), regions.with_values(leaves[1]), weights.with_tensors(leaves[2:])
        return torch.autograd.grad(regulated.SCORES[form](*given), leaves, incoming.to(dtype))

    exact = gradients("packed", torch.float64)
    return {
        form: max(
            float((own - right).norm() / right.norm())
            for own, right in zip(gradients(form, torch.float32), exact, strict=True)
            # The bias of the softmax's logits has no gradient.
            if float(right.norm()) > 1e-6
        )
        for form in FORMS
    }


def run(
    sizes: Sizes,
    *,
    rounds: int,
    threads: int,
    memory: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure forward and steps of all forms, interleaved; with `memory`, also the peak memory of each."""
    torch.set_num_threads(threads)
    load_before = os.getloadavg()[0]
    makes: dict[str, Callable[..., Callable[[], Any]]] = {}
    for form in FORMS:
        makes[f"{form} scores"] = partial(regulated.make_regulated_scores, form, sizes)
        for mining in MININGS:
            makes[f"{form} {mining}"] = partial(make_step, form, sizes, mining)
    calls = {name: make() for name, make in makes.items()}
    timings = interleave(calls, dict.fromkeys(calls, rounds), processor_time, progress)
    results = {name: timing.as_dict() for name, timing in timings.items()}
    for name, make in (makes if memory else {}).items():
        progress(f"memory of {name}")
        results[name]["peak_bytes"] = peak_memory(make, threads=threads)
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(threads, build_info()),
        "pairs": [sizes.captions, sizes.images],
        "dim": sizes.dim,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "measured": results,
        "gradient_errors": gradient_errors(Sizes(8, 8, sizes.dim)),
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Render time, multiple of the forward, memory and accuracy of each form."""
    found, where = results["measured"], results["environment"]
    rows = [["RCAR t2i, 2 RAR and 1 RCR", "time", "times its forward", "peak memory", "error of the gradients"]]
    titles = {"scores": "forward", "hardest": "step, hardest negatives", "all": "step, all negatives"}
    for form in FORMS:
        label = "itm_fast" if form == "native" else "packed PyTorch"
        forward = found[f"{form} scores"]["median_s"]
        for name, title in titles.items():
            row = found[f"{form} {name}"]
            error = "" if name == "scores" else f"{results['gradient_errors'][form]:.1e}"
            rows.append(
                [
                    f"{label}, {title}",
                    f"{row['median_s']:.2f} s [{row['min_s']:.2f}, {row['max_s']:.2f}]",
                    f"{row['median_s'] / forward:.2f}",
                    f"{row['peak_bytes'] / 1e6:.0f} MB",
                    error,
                ]
            )
    captions, images = results["pairs"]
    runs = len(found["native scores"]["runs_s"])
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at {commit_of(where)}: "
        f"{where['processor']}, {where['threads']} threads, {where['instruction_set']}, torch {where['torch']}, "
        f"float32, {captions} x {images} pairs, d = {results['dim']}, m = 256. Medians of {runs} interleaved runs in "
        f"processor time, smallest and largest in brackets; peak memory above the inputs, each in a separate "
        f"process; gradients of 8 x 8 pairs against float64, the largest relative error of all tensors. Load of the "
        f"machine: {results['load_before']:.1f} before, {results['load_after']:.1f} after.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark training steps of RCAR.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--batch", type=int, default=128, help="images and captions (default 128)")
    parser.add_argument("--dim", type=int, default=1024, help="width of rows (default 1024)")
    options = parser.parse_args()
    results = run(
        Sizes(options.batch, options.batch, options.dim),
        rounds=options.rounds,
        threads=options.threads,
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
