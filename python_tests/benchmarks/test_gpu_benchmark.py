"""The GPU benchmark on a machine without a GPU: clock, memory, rates, written results and rejected ones."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks import costs, dense_costs, gpu, maxsim_costs
from benchmarks.gpu_table import check_is_of_a_gpu, markdown
from benchmarks.gpu_workloads import make_matching_step
from benchmarks.performance import WORKLOADS
from itm_fast import build_info
from itm_fast.benchmarking import workloads
from itm_fast.benchmarking.measure import CpuMeter, CudaMeter, interleave
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.processes import ROOT, run

DRY = replace(gpu.PRESETS["dry"], runs=2)


class FakeCuda:
    """A device with a simulated clock and memory: `work` advances the clock, `allocate` raises the peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used, self.peak = 100.0, 5000, 5000
        self.order: list[str] = []
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now
                fake.order.append("record")

            def synchronize(self) -> None:
                fake.order.append("synchronize")

            def elapsed_time(self, end: Event) -> float:
                assert fake.order[-1] == "synchronize", "read before the device was waited for"
                return 1e3 * (end.at - self.at)

        replaced = {
            "Event": Event,
            "is_available": lambda: True,
            "synchronize": lambda: fake.order.append("synchronize"),
            "memory_allocated": lambda: fake.used,
            "max_memory_allocated": lambda: fake.peak,
            "reset_peak_memory_stats": lambda: setattr(fake, "peak", fake.used),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(CudaMeter, "FLUSH_BYTES", 16)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.order.append("work")

    def allocate(self, size: int) -> None:
        self.peak = max(self.peak, self.used + size)


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    meter = CudaMeter(device="cpu")
    meter._flush.fill_(7)
    assert meter.time_of(lambda: cuda.work(0.25)) == pytest.approx(0.25)
    assert cuda.order == ["record", "work", "record", "synchronize"]
    assert meter._flush.tolist() == [0] * 16  # The caches were flushed.
    calls = {"slow": lambda: cuda.work(2.0), "fast": lambda: cuda.work(0.5)}
    timings = interleave(calls, {"slow": 1, "fast": 3}, meter.time_of)
    assert {name: timing.runs for name, timing in timings.items()} == {"slow": [2.0], "fast": [0.5] * 3}


def test_memory_of_a_gpu_is_the_peak_above_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    sizes = iter([9000, 700])  # The first call allocates more than later ones.
    peak = CudaMeter(device="cpu").peak_bytes(lambda name: lambda: cuda.allocate(next(sizes)), "variant")
    assert peak == 700


def test_without_a_gpu_the_benchmark_of_one_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        return
    problem = f"no CUDA device: torch {torch.__version__} sees none"
    with pytest.raises(RuntimeError, match=f"^{re.escape(problem)}$"):
        CudaMeter()
    result = run([sys.executable, "-m", "itm_fast", "bench", "--device", "cuda", "--quick"], cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"itm-fast: error: {problem}"
    assert "Traceback" not in result.stderr


def dry_run(**options: Any) -> dict[str, Any]:
    return json.loads(json.dumps(gpu.run(DRY, CpuMeter(1), **options)))


def test_a_run_holds_rates_of_the_cost_model() -> None:
    saved: list[int] = []
    results = dry_run(save=lambda results: saved.append(len(results["workloads"])))
    assert saved == [*range(1, 21), 20]
    found = results["workloads"]["scores 4"]
    assert found["cost"] == asdict(costs.scores(4, 4, 16))
    native = found["variants"]["native"]
    cost = costs.scores(4, 4, 16, element=4)
    assert native["flop_per_s"] == pytest.approx((cost.tensor + cost.other) / native["median_s"])
    assert native["bytes_per_s"] == pytest.approx(cost.bytes / native["median_s"])
    low = found["variants"]["native bf16"]
    assert low["bytes_per_s"] == pytest.approx(costs.scores(4, 4, 16).bytes / low["median_s"])
    gemm, copy = results["ceilings"]["gemm_bf16"], results["ceilings"]["copy"]
    assert gemm["flop_per_s"] == pytest.approx(2 * DRY.product**3 / gemm["median_s"])
    assert copy["bytes_per_s"] == pytest.approx(2 * DRY.copied_bytes / copy["median_s"])
    assert native["share_of_gemm"] == pytest.approx(cost.tensor / native["median_s"] / gemm["flop_per_s"])
    assert native["share_of_copy"] == pytest.approx(cost.bytes / native["median_s"] / copy["bytes_per_s"])
    assert "flop_per_s" not in found["variants"]["loop"]
    assert native["accuracy"]["max_score_error"] < 1e-6
    matching, of_all = results["workloads"]["matching step 4"], results["workloads"]["step all 4"]
    assert matching["cost"] == asdict(costs.matching_step(4, 16))
    assert list(matching["variants"])[2:] == ["native", "native high", "native medium", "native bf16"]
    assert of_all["cost"] == asdict(dense_costs.step_cost(4, 16))
    long = results["workloads"]["long scores 3 x 7"]
    assert long["cost"] == asdict(costs.scores(4, 4, 16, words=3, regions=7))
    assert long["variants"]["native"]["accuracy"]["max_score_error"] < 1e-6
    of_long = results["workloads"]["long step 3 x 7"]
    assert of_long["cost"] == asdict(costs.step(4, 16, words=3, regions=7))
    assert list(of_long["variants"])[:3] == ["packed", "packed bf16", "native"]
    of_rcar = results["workloads"]["regulated scores 4"]
    assert of_rcar["cost"] == asdict(costs.regulated_scores(4, 4, 16))
    assert of_rcar["variants"]["native"]["accuracy"]["max_score_error"] < 1e-5
    assert results["workloads"]["regulated step 4"]["cost"] == asdict(costs.regulated_step(4, 16))
    of_all_negatives = results["workloads"]["regulated step all 4"]["cost"]
    assert of_all_negatives == asdict(costs.regulated_step(4, 16, partners=4))
    of_maxsim, of_step = (results["workloads"][f"maxsim {name} 3 x 5"] for name in ("scores", "step"))
    (sizes,) = DRY.maxsim
    assert of_maxsim["cost"] == asdict(maxsim_costs.scores_cost(sizes))
    assert of_maxsim["variants"]["native"]["accuracy"]["max_score_error"] < 1e-5
    assert of_step["cost"] == asdict(maxsim_costs.step_cost(sizes))
    rate = of_step["variants"]["native"]["bytes_per_s"]
    assert rate == pytest.approx(maxsim_costs.step_cost(sizes, 4).bytes / of_step["variants"]["native"]["median_s"])
    selective, boosting = (results["workloads"][f"{name} 8"] for name in ("loss selective", "boosting all"))
    assert (selective["cost"], boosting["cost"]) == (asdict(costs.loss(8)), asdict(costs.boosting_loss(8)))
    for loss in (selective, boosting):
        assert list(loss["variants"]) == ["plain", "native"]
        assert all(figures["accuracy"]["relative_loss_error"] < 1e-6 for figures in loss["variants"].values())
    rate = boosting["variants"]["native"]["bytes_per_s"]
    assert rate == pytest.approx(3 * 4 * 8**2 / boosting["variants"]["native"]["median_s"])
    text = markdown(results)
    assert "| scores 4 | itm_fast |" in text
    assert "| boosting hardest 8 | itm_fast |" in text
    ratio = found["variants"]["loop"]["median_s"] / native["median_s"]
    assert f"| {ratio:.1f}x |" in text


def test_a_full_run_measures_every_line_of_the_predictions() -> None:
    for preset in ("full", "quick"):
        names = [workload.name for workload in gpu._workloads(gpu.PRESETS[preset], "cuda")]
        assert len(set(names)) == len(names)
        assert {workload.measured_as for workload in WORKLOADS} <= set(names)
    negatives = {
        workload.name: workload.arguments[1:]
        for workload in gpu._workloads(gpu.PRESETS["full"], "cuda")
        if "step" in workload.name
    }
    assert (negatives["regulated step 128"], negatives["regulated step all 128"]) == (("hardest",), ("all",))
    for tokens, patches in itertools.product((32, 64), (196, 576)):
        assert {f"long {what} {tokens} x {patches}" for what in ("scores", "step")} <= set(names)


@pytest.mark.parametrize("variant", ["native", "native high", "native bf16"])
def test_a_step_in_one_call_has_the_gradients_of_separate_calls(variant: str) -> None:
    sizes = workloads.Sizes(5, 5, 16)
    with native_calls() as calls:
        found = make_matching_step(variant, sizes)()
    if build_info()["dispatch"]["matching_loss"]["cpu"].startswith("native"):
        assert "matching_loss" in [name for name, _ in calls]
    for actual, expected in zip(found, workloads.make_step(variant, sizes)(), strict=True):
        assert torch.equal(actual, expected)


def test_kernels_that_are_not_registered_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = frozenset({"triplet_loss", "triplet_loss_backward", "retrieval_ranks"})
    monkeypatch.setattr(gpu, "operators_of", lambda device: registered)
    results = dry_run()
    scores = ["cross_attention_scores"]
    backward = ["cross_attention_scores_backward"]
    regulated = {"regulated scores 4": ["regulated_scores"]}
    for name in ("regulated step 4", "regulated step all 4"):
        regulated[name] = ["regulated_scores", "regulated_scores_backward"]
    regulated["maxsim scores 3 x 5"] = ["maxsim_scores"]
    regulated["maxsim step 3 x 5"] = ["maxsim_scores", "maxsim_scores_backward"]
    of_scores = {"scores 4": scores, "step 4": scores + backward, "evaluation 2 x 10": scores}
    of_scores["evaluation 3 x 15"] = scores
    of_scores |= {"step all 4": scores + backward, "matching step 4": ["matching_loss", *backward]}
    of_scores |= {"long scores 3 x 7": scores, "long step 3 x 7": scores + backward}
    boosting = {f"boosting {mining} 8": ["boosting_loss", "boosting_loss_backward"] for mining in ("hardest", "all")}
    assert results["not_built"] == of_scores | regulated | boosting
    assert list(results["workloads"]["step 4"]["variants"]) == ["loop", "packed", "packed bf16"]
    assert "native" in results["workloads"]["ranks 2 x 10"]["variants"]
    line = "scores 4: the native variants were not run, because there are no CUDA kernels of cross_attention_scores."
    assert line in markdown(results)


def test_a_variant_that_fails_is_written_down_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    original = workloads.make_scores

    def make_scores(variant: str, *arguments: Any, small: bool = False) -> Any:
        if variant == "packed bf16":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return original(variant, *arguments, small=small)

    monkeypatch.setattr(workloads, "make_scores", make_scores)
    results = dry_run()
    assert results["failed"] == {"scores 4": {"packed bf16": "OutOfMemoryError: CUDA out of memory."}}
    variants = results["workloads"]["scores 4"]["variants"]
    assert list(variants) == ["loop", "packed", "native", "native high", "native medium", "native bf16"]
    assert "accuracy" in variants["native"]
    assert "scores 4: packed bf16 failed with OutOfMemoryError: CUDA out of memory." in markdown(results)


def test_slow_variants_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_seconds_of", lambda call, meter: 0.1)
    [scores] = [w for w in gpu._workloads(replace(DRY, runs=30, loop_runs=4), "cpu") if w.name == "scores 4"]
    found, _ = gpu._measured(
        scores, scores.natives, DRY, CpuMeter(1), lambda _: None, dry_run(limit_s=-1.0)["ceilings"]
    )
    counts = {name: len(figures["runs_s"]) for name, figures in found["variants"].items()}
    assert counts == {"loop": 4, **dict.fromkeys(["packed", "packed bf16"], 5), **dict.fromkeys(scores.natives, 2)}


def test_what_the_limit_leaves_out_is_listed() -> None:
    results = dry_run(limit_s=-1.0)
    assert results["workloads"] == {}
    names = ["scores 4", "step 4", "matching step 4", "step all 4"]
    names += ["regulated scores 4", "regulated step 4", "regulated step all 4", "long scores 3 x 7", "long step 3 x 7"]
    names += ["maxsim scores 3 x 5", "maxsim step 3 x 5", "loss hardest 8", "loss all 8"]
    names += ["loss selective 8", "boosting hardest 8", "boosting all 8", "ranks 2 x 10", "evaluation 2 x 10"]
    names += ["ranks 3 x 15", "evaluation 3 x 15"]
    assert results["not_run"] == names
    assert f"Not run because of the time limit: {', '.join(names)}." in markdown(results)


def test_a_dry_run_is_never_taken_for_a_gpu() -> None:
    results = dry_run(limit_s=-1.0)
    assert results["dry_run"] is True
    name = results["device"]["name"]
    assert name.startswith("dry run on ")
    assert costs.device_of(name) is None
    assert markdown(results).startswith("**A dry run without a GPU, whose times mean nothing.** ")
    with pytest.raises(ValueError, match=r"^r\.json: measured without a GPU, on 'dry run on "):
        check_is_of_a_gpu(results, "r.json")
    # Each of the two marks is enough to reject the results.
    for change in ({"dry_run": False}, {"device": {"type": "cuda", "name": "NVIDIA H200"}}):
        with pytest.raises(ValueError, match="measured without a GPU"):
            check_is_of_a_gpu({**results, **change}, "r.json")
    with pytest.raises(ValueError, match="expected kind 'itm_fast GPU benchmark' in format 1, got None in format 2"):
        check_is_of_a_gpu(json.loads((ROOT / "benchmarks/results/cpu.json").read_text()), "cpu.json")
    real = {**results, "dry_run": False, "device": {"type": "cuda", "name": "NVIDIA H200"}}
    check_is_of_a_gpu(real, "r.json")
