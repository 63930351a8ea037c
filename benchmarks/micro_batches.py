"""Measure memory and time of a batch that is encoded in micro-batches, compared with the plain batch, on the CPU.

Measures whole optimiser steps with the processes and clocks of `benchmarks.scenarios`.

Inside: `SETUPS`, `run`, `markdown`.

python -m benchmarks.micro_batches --json benchmarks/results/micro_batches.json   # half an hour
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.scenarios import (
    Setup,
    make_batch,
    make_start,
    make_step,
    memory_given_back,
    processor_time,
)
from benchmarks.units import commit_of
from itm_fast.benchmarking.measure import interleave, peak_memory
from itm_fast.benchmarking.run import FORMAT_VERSION
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["SETUPS", "markdown", "run"]

# Each with its micro-batches and the number of measured runs.
SETUPS: Sequence[tuple[Setup, tuple[int, ...], int]] = (
    (Setup("scan", batch=1024, dim=256), (128, 64), 1),
    (Setup("vse_infty", batch=4096, dim=256), (128,), 1),
)

QUICK = ((Setup("scan", batch=32, dim=64, features=64, words=500), (8,), 2),)


def _label(size: int | None) -> str:
    return "plain" if size is None else str(size)


def run(
    setups: Sequence[tuple[Setup, tuple[int, ...], int]] = SETUPS,
    threads: int = 1,
    *,
    memory: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a step of each setup, plain and in micro-batches, interleaved; return the content of the JSON file."""
    torch.set_num_threads(threads)
    start, measured = partial(make_start, steps=2), []
    for setup, sizes, runs in setups:
        batch = make_batch(setup)
        sized = {_label(size): attrs.evolve(setup, micro_batch=size) for size in (None, *sizes)}
        variants: dict[str, Callable[[], Any]] = {
            name: make_step("single", one, batch=batch) for name, one in sized.items()
        }
        timings = interleave(variants, dict.fromkeys(variants, runs), processor_time, progress)
        rows = {name: timing.as_dict() for name, timing in timings.items()}
        del variants, batch
        for name, one in sized.items() if memory else ():
            progress(f"{name}, memory")
            with memory_given_back():
                rows[name]["peak_bytes"] = peak_memory(start, "single", one, threads=threads)
        measured.append({"setup": setup.as_dict(), "rows": rows})
    where = environment(threads, build_info())
    return {"format_version": FORMAT_VERSION, "environment": where, "setups": measured}


def markdown(results: Mapping[str, Any]) -> str:
    """Render one table of all setups: peak memory and time of a step, compared with the plain batch."""
    where = results["environment"]
    lines = [
        "| model, batch, width | micro-batch | peak memory | of the plain batch | time of a step | of the plain one |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for measured in results["setups"]:
        setup, rows = measured["setup"], measured["rows"]
        plain = rows["plain"]
        for name, row in rows.items():
            room, share = "", ""
            if row.get("peak_bytes"):
                room = f"{row['peak_bytes'] / 1e6:,.0f} MB"
                share = f"{row['peak_bytes'] / plain['peak_bytes']:.2f}"
            times = f"{row['median_s']:.1f} s", f"{row['median_s'] / plain['median_s']:.2f}"
            cells = [f"{setup['model']}, {setup['batch']}, {setup['dim']}", name, room, share, *times]
            lines.append(f"| {' | '.join(cells)} |")
    runs = ", ".join(
        f"{len(measured['rows']['plain']['runs_s'])} of batches of {measured['setup']['batch']}, width "
        f"{measured['setup']['dim']}"
        for measured in results["setups"]
    )
    lines += [
        "",
        f"Processor time, median of interleaved runs ({runs}); memory is the peak of a fresh process with its model, "
        f"optimiser and two steps, without the features of the batch. {where['processor']}, {where['threads']} "
        f"thread(s), {where['date'][:10]}, commit {commit_of(where)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure large batches with and without micro-batches.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--quick", action="store_true", help="use small sizes for a trial of seconds")
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
