"""Time the kernels of a GPU's workloads with torch's profiler, for several builds.

    python -m benchmarks.kernel_times "what this build has" FILE    # adds the build of this checkout to FILE

Inside: `add`, `measure`, `fastest`, `markdown`. Inputs are in cache after the first run. The time between kernels does
not count, so a workload takes longer than the sum.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import PRESETS, GpuPreset, _workloads
from benchmarks.machine import described_device
from benchmarks.units import commit_of, seconds
from itm_fast.benchmarking.table import megabytes, table, time
from itm_fast.files.atomic import write_text
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "KIND", "add", "fastest", "markdown", "measure"]

FORMAT_VERSION, KIND = 1, "itm_fast kernel times"
PRECISIONS = {"native": "float32", "native bf16": "bfloat16"}
RUNS = 5
# The table leaves out kernels with a smaller share of their workload.
LEAST_SHARE = 0.15


def kernel_seconds(events: Iterable[Any], runs: int = RUNS) -> dict[str, float]:
    """Return the time of each kernel in a run, by its name without "_kernel": its median times its launches."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = re.search(r"(\w+)_kernel", event.name)
            found[name[1] if name else event.name.split()[0]].append(event.device_time / 1e6)
    return {name: statistics.median(times) * len(times) / runs for name, times in found.items()}


def _profiled(call: Callable[[], Any]) -> list[Any]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RUNS):
            call()
        torch.cuda.synchronize()
    return list(profile.events())


def measure(
    preset: GpuPreset, device: str = "cuda", profiled: Callable[[Callable[[], Any]], Iterable[Any]] = _profiled
) -> dict[str, dict[str, dict[str, float]]]:
    """Return seconds of kernels by workload and precision."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for workload in _workloads(preset, device):
        for variant in workload.natives:
            if variant in PRECISIONS:
                times = kernel_seconds(profiled(workload.make(variant, *workload.arguments)))
                found.setdefault(workload.name, {})[PRECISIONS[variant]] = times
    return found


def add(results: Mapping[str, Any], name: str, device: str, times: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with one more build; ValueError if the others were measured on another device."""
    described = described_device(device)
    builds = results.get("builds", [])
    if builds and results["device"]["name"] != described["name"]:
        raise ValueError(f"the other builds were measured on '{results['device']['name']}'")
    build = {"name": name, "environment": environment(torch.get_num_threads(), build_info()), "workloads": times}
    return {
        **results,
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "device": described,
        "builds": [*builds, build],
    }


def fastest(results: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Return the seconds of all kernels of each workload in its fastest build, and the name of an older build.

    The name is that of the last build that ran the workload, and empty if no build came later. Rows are bfloat16;
    losses and ranks have no rows.
    """
    found: dict[str, tuple[float, str]] = {}
    for build in results["builds"]:
        for workload, precisions in build["workloads"].items():
            total = sum((precisions.get("bfloat16") or precisions["float32"]).values())
            since = "" if workload in results["builds"][-1]["workloads"] else build["name"]
            found[workload] = (min(total, found.get(workload, (total, ""))[0]), since)
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Render the times of the kernels of all builds, and where they were measured.

    More follows if the results have it: how a profiler found units and warps busy ("profile"), a workload beside plain
    PyTorch ("compared"), and tests that ran on the GPU ("checks").
    """
    parts = [_times(results)]
    if "profile" in results:
        parts.append(_profile(results["profile"]))
    if "compared" in results:
        parts.append(_compared(results["compared"]))
    if "checks" in results:
        parts.append(f"Checks on this GPU: {'; '.join(results['checks'])}.")
    return "\n\n".join(parts) + "\n"


def _profile(found: Mapping[str, Any]) -> str:
    sampled = found["samples"]
    shares = ", ".join(f"{100 * share:.0f} % in {part}" for part, share in sampled["shares"].items())
    header = ["kernel", "workload", "time", "arithmetic", "memory", "cycles between instructions", "warps"]
    rows = [header]
    for kernel in found["kernels"]:
        rows.append(
            [
                f"`{kernel['kernel']}`",
                kernel["workload"],
                seconds(kernel["seconds"]),
                f"{100 * kernel['compute_share']:.0f} %",
                f"{100 * kernel['memory_share']:.0f} %",
                f"{kernel['cycles_per_instruction']:.1f}",
                f"{kernel['warps']:.1f}",
            ]
        )
    return (
        f"{table(rows)}\n\n"
        f"The {found['build']} on {found['rows']} rows, by `{found['command']}`: how busy the busiest arithmetic and "
        "the busiest memory unit are, cycles from one instruction of a warp to its next, and warps per multiprocessor. "
        f"Samples of `{sampled['kernel']}`, {sampled['workload']}: {shares}."
    )


def _compared(found: Mapping[str, Any]) -> str:
    variants = found["variants"]
    loop = variants["loop"]["median_s"]
    rows = [["variant", "time", "against the loop", "peak memory", "largest error"]]
    for name, figures in variants.items():
        rows.append(
            [
                name.replace("native", "itm_fast"),
                time(figures),
                f"{loop / figures['median_s']:.1f}x",
                megabytes(figures),
                f"{figures['accuracy']['max_score_error']:.1e}",
            ]
        )
    return (
        f"{table(rows)}\n\n"
        f"{found['workload']}, {found['build']}, between events of the GPU, with cold caches and the time between "
        f"launches; by `{found['command']}`."
    )


def _times(results: Mapping[str, Any]) -> str:
    builds, device = results["builds"], results["device"]
    names = [build["name"] for build in builds]
    rows = [["kernel", "workload", "rows", *names]]
    first = builds[0]["workloads"]
    shown: dict[tuple[str, ...], list[float]] = {}
    for workload, precision in ((w, p) for w, precisions in first.items() for p in precisions):
        total = sum(first[workload][precision].values())
        for kernel, of_first in first[workload][precision].items():
            if of_first < LEAST_SHARE * total:
                continue
            times = [build["workloads"].get(workload, {}).get(precision, {}).get(kernel) for build in builds]
            known = [one for one in times if one is not None]
            size = re.findall(r"[\dx ]+$", workload)
            seen = shown.setdefault((kernel, precision, *size), [])
            # A step has the same scores as the scores alone. One build alone compares nothing.
            if len(known) < min(2, len(builds)) or any(0.9 < of_first / other < 1.1 for other in seen):
                continue
            seen.append(of_first)
            cells = ["" if t is None else f"**{seconds(t)}**" if t == min(known) else seconds(t) for t in times]
            rows.append([f"`{kernel}`", workload, precision, *cells])
    ran = builds[-1]["environment"]
    where = f"{device['name']}, driver {device['driver']}, torch {ran['torch']}, {ran['date'][:10]}"
    commits = ", ".join(f"{commit_of(build['environment'])} ({build['name']})" for build in builds)
    return (
        f"{table(rows)}\n\n"
        "Medians of torch's profiler, inputs in cache, without the time between kernels; the fastest build in bold. "
        f"{where}; kernels of {commits}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="kernel_times", description="Time the kernels of a build on a GPU.")
    parser.add_argument("name", help="what the build has, as the head of its column")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON file; the build is added to those in it")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    options = parser.parse_args()
    before = json.loads(options.file.read_text()) if options.file.exists() else {}
    results = add(before, options.name, "cuda", measure(PRESETS[options.preset]))
    write_text(options.file, json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
