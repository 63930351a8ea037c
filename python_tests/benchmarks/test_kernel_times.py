"""Times of kernels by torch's profiler, without a GPU: medians, builds to compare, and the table."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernel_times
from benchmarks.gpu import PRESETS
from benchmarks.performance import NOT_RUN, tables
from python_tests.helpers.processes import ROOT

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def event(name: str, microseconds: float, device: Any = CUDA) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_time=microseconds, device_type=device)


def test_the_median_of_each_kernel_counts() -> None:
    name = "void itm_fast::cuda::score_tile_kernel<float, 3>(Problem)"
    events = [event(name, time) for time in (3.0, 90.0, 5.0)] + [event("add", 7.0, CPU)]
    events += [event("Memset (Device)", 1.0)] * 6  # two in each run
    assert kernel_times.kernel_seconds(events, 3) == pytest.approx({"score_tile": 5e-6, "Memset": 2e-6})


def test_workloads_are_measured_in_both_precisions() -> None:
    calls = []

    def profiled(call: Any) -> list[Any]:
        calls.append(call())
        return [event("a_kernel", 2.0)] * kernel_times.RUNS

    found = kernel_times.measure(PRESETS["dry"], "cpu", profiled)
    assert found["scores 4"] == {precision: {"a": 2e-6} for precision in ("float32", "bfloat16")}
    assert found["loss hardest 8"] == {"float32": {"a": 2e-6}}
    assert len(calls) == sum(map(len, found.values()))


def build(times: dict[str, float]) -> dict[str, Any]:
    return {"scores 128": {"bfloat16": times}, "step 128": {"bfloat16": {"slow": 1.0}}}


def test_builds_are_added_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    results = kernel_times.add({}, "before", "cpu", build({"slow": 3e-4, "short": 1e-6}))
    results = kernel_times.add(results, "now", "cpu", build({"slow": 2e-4, "short": 2e-6}))
    results["device"]["driver"] = "1.0"
    results["builds"][0]["workloads"]["gone"] = {"float32": {"slow": 1e-3}}
    results["builds"][1]["workloads"]["ranks"] = {"float32": {"slow": 2e-3, "short": 1e-3}}
    fastest = kernel_times.fastest(results)
    expected = {"scores 128": 2.02e-4, "step 128": 1.0, "gone": 1e-3, "ranks": 3e-3}
    assert {workload: seconds for workload, (seconds, _) in fastest.items()} == pytest.approx(expected)
    assert {workload: build for workload, (_, build) in fastest.items() if build} == {"gone": "before"}
    text = kernel_times.markdown(results)
    assert "| kernel | workload | rows | before | now |" in text
    assert "| `slow` | scores 128 | bfloat16 | 300 µs | **200 µs** |" in text
    assert "`short`" not in text
    monkeypatch.setattr(kernel_times, "described_device", lambda device: {"name": "another"})
    with pytest.raises(ValueError, match=r"^the other builds were measured on 'dry run on "):
        kernel_times.add(results, "third", "cpu", {})


def test_the_committed_results_have_all_three_tables() -> None:
    results = json.loads((ROOT / "benchmarks/results/kernel_times.json").read_text())
    text = kernel_times.markdown(results)
    assert text.count("| --- |") == 3
    fast, loop = (results["compared"]["variants"][name]["median_s"] for name in ("native bf16", "loop"))
    assert re.search(rf"\| itm_fast bf16 \| [^|]+ \| {loop / fast:.1f}x \|", text)
    [scores] = [k for k in results["profile"]["kernels"] if k["workload"] == "scores 1024"]
    assert f"| `score_tile` | scores 1024 | {1e3 * scores['seconds']:.2f} ms | " in text


def test_the_predictions_show_what_the_kernels_take() -> None:
    results = json.loads((ROOT / "benchmarks/results/kernel_times.json").read_text())
    of_h200, _, rest = tables([], results).partition("| on H200 ")[2].partition("\n\n")
    of_a100 = tables([], results).partition("| on A100 ")[2].partition("\n\n")[0]
    lines = {line.split(" | ")[0].strip("| "): line for line in of_h200.splitlines()}
    milliseconds = 1e3 * kernel_times.fastest(results)["scores 1024"][0]
    assert f"**{milliseconds:.3g} ms** in kernels, floor / time " in lines["scores, 1024 x 1024"]
    assert "** in kernels (build: first kernels), floor / time " in lines["RCAR scores, 1024 x 1024"]
    assert lines["ranks, 5000 x 25000"].endswith("| not measured |")
    assert NOT_RUN not in of_h200
    ratio = milliseconds / float(re.search(r"\| ([\d.]+) ms \| [\d.]+ ms \|", lines["scores, 1024 x 1024"])[1])
    lowest, highest = map(float, re.findall(r"take ([\d.]+) to ([\d.]+) times as long as predicted", rest)[0])
    assert lowest <= round(ratio, 1) < highest
    assert of_a100.count(NOT_RUN) == len(of_a100.splitlines()) - 2
