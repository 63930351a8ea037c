"""Render the tables of a GPU benchmark as Markdown, using only its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import FORMAT_VERSION, KIND
from benchmarks.units import commit_of
from itm_fast.benchmarking.table import megabytes, table, time

__all__ = ["check_is_of_a_gpu", "markdown"]


def check_is_of_a_gpu(results: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless `results`, read from the file `name`, are those of a benchmark on a GPU."""
    kind, version = results.get("kind"), results.get("format_version")
    if kind != KIND or version != FORMAT_VERSION:
        raise ValueError(f"{name}: expected kind '{KIND}' in format {FORMAT_VERSION}, got {kind!r} in format {version}")
    device = results.get("device", {})
    if results.get("dry_run") is not False or device.get("type") != "cuda":
        raise ValueError(f"{name}: measured without a GPU, on '{device.get('name')}'")


def markdown(results: Mapping[str, Any]) -> str:
    """Render the machine, the peaks of the device, and a line for every variant of every workload."""
    parts = [_where(results), _workloads(results["workloads"])]
    for name, missing in results["not_built"].items():
        kernels = ", ".join(missing)
        parts.append(f"{name}: the native variants were not run, because there are no CUDA kernels of {kernels}.")
    for name, failed in results["failed"].items():
        parts += [f"{name}: {variant} failed with {problem}" for variant, problem in failed.items()]
    if results["not_run"]:
        parts.append(f"Not run because of the time limit: {', '.join(results['not_run'])}.")
    return "\n\n".join(parts) + "\n"


def _where(results: Mapping[str, Any]) -> str:
    environment, device, reached = results["environment"], results["device"], results["ceilings"]
    commit = commit_of(environment, "an installed package")
    dry = "**A dry run without a GPU, whose times mean nothing.** " if results["dry_run"] else ""
    driver = f" (driver {device['driver']}, CUDA {device['cuda']})" if device["type"] == "cuda" else ""
    return (
        f"{dry}Measured on {environment['date'][:10]} with `{environment['command']}` at {commit}: "
        f"{device['name']}{driver}, torch {environment['torch']}. In the same run a product of random bf16 matrices "
        f"reached {reached['gemm_bf16']['flop_per_s'] / 1e12:.3g} TFLOP/s and a copy "
        f"{reached['copy']['bytes_per_s'] / 1e12:.3g} TB/s, read and written; shares below refer to these, with the "
        "operations and bytes of the cost model. Medians, smallest and largest in brackets; memory above the inputs."
    )


def _workloads(measured: Mapping[str, Any]) -> str:
    header = ["workload", "variant", "time", "against the loop", "against the best packed form"]
    rows = [[*header, "share of the product", "share of the copy", "peak memory"]]
    for workload, found in measured.items():
        variants = found["variants"]
        loop = variants.get("loop")
        plain = [v["median_s"] for name, v in variants.items() if name.startswith(("packed", "plain"))]
        for name, figures in variants.items():
            native = name.startswith("native")
            rows.append(
                [
                    workload,
                    name.replace("native", "itm_fast"),
                    time(figures),
                    f"{loop['median_s'] / figures['median_s']:.1f}x" if loop and name != "loop" else "",
                    f"{min(plain) / figures['median_s']:.1f}x" if native and plain else "",
                    f"{100 * figures['share_of_gemm']:.0f} %" if native else "",
                    f"{100 * figures['share_of_copy']:.0f} %" if native else "",
                    megabytes(figures) if figures.get("peak_bytes") is not None else "",
                ]
            )
    return table(rows)
