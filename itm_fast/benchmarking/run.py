"""Run the benchmark: choose workloads and repeats, and record the environment of the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any

import torch

from itm_fast.benchmarking import one_query, regulated, workloads
from itm_fast.benchmarking.measure import CpuMeter, Meter, interleave
from itm_fast.benchmarking.workloads import Sizes
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = [
    "FORMAT_VERSION",
    "PRESETS",
    "Preset",
    "compiler_found",
    "measure_variants",
    "run",
]

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Preset:
    """Extent of a benchmark: sizes, repeats of the fast variants and of the loop, and optional measurements."""

    batch: int
    dim: int
    evaluation_images: int
    evaluation_captions: int
    loss_batches: tuple[int, ...]
    runs: int
    loop_runs: int
    evaluation_loop_runs: int
    query_images: int
    index_images: int
    compiled: bool = True  # the packed form under torch.compile too, where there is a compiler
    memory: bool = True


PRESETS = {
    "full": Preset(
        128,
        1024,
        1000,
        5000,
        (128, 4096),
        runs=11,
        loop_runs=5,
        evaluation_loop_runs=1,
        query_images=4000,
        index_images=10_000,
    ),
    "quick": Preset(
        16, 128, 20, 100, (16, 64), runs=2, loop_runs=1, evaluation_loop_runs=1, query_images=40, index_images=40
    ),
}


def run(preset: Preset, meter: Meter, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure everything of `preset` on the meter's device; return the content of the JSON file.

    Raises:
        RuntimeError: there are no native kernels for the device.
    """
    info, device = build_info(), meter.device
    if not info["dispatch"]["cross_attention_scores"][device].startswith("native"):
        raise RuntimeError(f"nothing to measure: {info['dispatch']['cross_attention_scores'][device]}")
    before = torch.get_num_threads()
    threads = meter.threads if isinstance(meter, CpuMeter) else before
    torch.set_num_threads(threads)
    try:
        square = Sizes(preset.batch, preset.batch, preset.dim, device)
        gallery = Sizes(preset.evaluation_images, preset.evaluation_captions, preset.dim, device)
        compiled = ["packed compiled"] if preset.compiled and compiler_found() else []
        low = ["packed bf16", "native high", "native medium", "native bf16"]
        variants = ["loop", "packed", *compiled, "native", *low]
        repeats = {name: preset.loop_runs if name == "loop" else preset.runs for name in variants}
        measure = partial(measure_variants, meter=meter, memory=preset.memory, progress=progress)
        once = preset.evaluation_loop_runs
        few = {"loop": once, "packed bounded": once}
        few |= {name: min(3, preset.runs) for name in ("native", *low[1:])}
        dense = {name: min(5, repeats[name]) for name in ("loop", "packed", *compiled, "native")}
        measured = {
            "scores": measure(workloads.make_scores, repeats, (square,)),
            "step": measure(workloads.make_step, repeats, (square,)),
            "step all": measure(workloads.make_step, dense, (square, "all")),
            "evaluation": measure(workloads.make_evaluation, few, (gallery,)),
        }
        gallery = Sizes(preset.query_images, 1, preset.dim, device)
        queries = dict.fromkeys(one_query.QUERIES, preset.runs)
        measured["query"] = measure(one_query.make_query, queries, (gallery,))
        for name in queries:
            progress(f"accuracy of query {name}")
            measured["query"]["variants"][name]["accuracy"] = one_query.accuracy(name, gallery)
        if device == "cpu":
            measured |= _of_index(preset, measure, progress)
        # A run of these takes seconds.
        slow = {name: min(2 if name == "loop" else 5, preset.runs) for name in regulated.SCORES}
        measured["regulated scores"] = measure(regulated.make_regulated_scores, slow, (square,))
        measured["regulated step"] = measure(regulated.make_regulated_step, slow, (square,))
        for name in variants:
            progress(f"accuracy of {name}")
            measured["scores"]["variants"][name]["accuracy"] = workloads.accuracy(name, square)
        for name in slow:
            progress(f"accuracy of regulated {name}")
            measured["regulated scores"]["variants"][name]["accuracy"] = regulated.accuracy(name, square)
        for batch in preset.loss_batches:
            for mining in ("hardest", "all"):
                both = {"plain": preset.runs, "native": preset.runs}
                for loss, title, make in (
                    ("triplet", "loss", workloads.make_loss),
                    ("boosting", "boosting", workloads.make_boosting),
                ):
                    found = measured[f"{title} {mining} {batch}"] = measure(make, both, (batch, mining, device))
                    for name, variant in found["variants"].items():
                        variant["accuracy"] = workloads.loss_accuracy(loss, name, batch, mining, device)
    finally:
        torch.set_num_threads(before)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "format_version": FORMAT_VERSION,
        "environment": {**environment(threads, info), "device": gpu},
        "preset": asdict(preset),
        "workloads": measured,
    }


def _of_index(
    preset: Preset, measure: Callable[..., dict[str, Any]], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure building, opening and searching an index."""
    # It needs packages that a GPU machine without network may lack, and benchmarks/gpu.py imports this module.
    from itm_fast.benchmarking import index_search

    sizes = (index_search.IndexSizes(preset.index_images),)
    searches = dict(zip(index_search.SEARCHES, (preset.runs, 2 * preset.runs, 10 * preset.runs), strict=True))
    found = {
        "index build": measure(index_search.make_build, {"native": min(3, preset.runs)}, sizes),
        "index open": measure(index_search.make_open, {"native": preset.runs}, sizes, memory=False),
        "index search": measure(index_search.make_search, searches, sizes),
    }
    for name in searches:
        progress(f"accuracy of search {name}")
        found["index search"]["variants"][name]["accuracy"] = index_search.accuracy(name, *sizes)
    return found


def measure_variants(
    make: Callable[..., Callable[[], Any]],
    repeats: Mapping[str, int],
    arguments: tuple[Any, ...],
    *,
    meter: Meter,
    memory: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Time all variants interleaved; with `memory`, also measure the peak memory of each."""
    what = make.__name__.removeprefix("make_")
    calls = {name: make(name, *arguments) for name in repeats}
    timings = interleave(calls, repeats, meter.time_of, progress=lambda name: progress(f"{what}: {name}"))
    results: dict[str, Any] = {}
    for name, timing in timings.items():
        results[name] = timing.as_dict()
        # What takes minutes is run once, for its time.
        if memory and repeats[name] > 1:
            progress(f"{what}: memory of {name}")
            results[name]["peak_bytes"] = meter.peak_bytes(make, name, *arguments)
    described = [asdict(part) if is_dataclass(part) and not isinstance(part, type) else part for part in arguments]
    return {"arguments": described, "variants": results}


def compiler_found() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name)
