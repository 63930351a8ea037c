"""Run the tests, the benchmark and the tools for GPUs on a simulated GPU (`helpers/stand_in.py`).

This finds their mistakes without a GPU. It does not show that the kernels are correct on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import check_cuda_library
import gpu_operators
import numpy as np
import pytest
import torch

import itm_fast.functional as F_itm
from benchmarks import gpu as benchmark
from benchmarks import gpu_bench
from benchmarks.gpu_table import check_is_of_a_gpu
from benchmarks.performance import tables
from itm_fast.benchmarking.measure import CudaMeter
from python_tests.helpers import devices
from python_tests.helpers.devices import (
    CASES,
    ONE_LAUNCH_STEP,
    Case,
    captured,
    inputs_of,
    launched,
    no_synchronization,
    past_the_room,
    run_case,
)
from python_tests.helpers.processes import ROOT
from python_tests.helpers.shim import compile_driver
from python_tests.helpers.stand_in import NAME, Gpu, WaitedError, stand_in
from python_tests.helpers.wrappers import WRAPPERS, Wrappers
from python_tests.operators import test_devices

# One case of each kind; the tests on the CPU cover the other options.
DRIVEN = (
    "cross_attention_scores default",
    "cross_attention_scores odd width",
    "regulated_scores of both regulators",
    "cross_attention_alignments after a step of RCR",
    "step",
    "step with one launch for the loss",
    "triplet_loss all",
    "boosting_loss both all",
    "triplet_loss selective in one launch",
    "boosting_loss hardest in one launch",
    "matching_loss t2i triplet hardest",
    "maxsim_scores of listed pairs",
    "hardest_negatives",
    "retrieval_ranks",
    "domain_regularization with negatives",
    "domain_regularization without negatives",
)
CASE_OF = {case.name: case for case in CASES}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with stand_in() as found:
        yield found


def of_gpus_alone(name: str) -> ModuleType:
    """Load a file of python_tests/cuda, which pytest collects only on a GPU."""
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", ROOT / "python_tests/cuda" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_equal(case: Case, seed: int, size: int, dtype: torch.dtype, device: str, found: list[torch.Tensor]) -> None:
    """Replace check_numbers: compare with the same kernels called directly."""
    right = run_case(F_itm, case, inputs_of(case, seed, size, dtype, "cpu"))
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_a_case_of_every_operator_is_driven() -> None:
    assert {CASE_OF[name].operators[0] for name in DRIVEN} == {case.operators[0] for case in CASES}


@pytest.mark.parametrize("name", DRIVEN)
def test_the_tests_of_a_device_run(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without synchronisation, in another stream, and as a graph replayed on other numbers."""
    monkeypatch.setattr(test_devices, "check_numbers", check_equal)
    test_devices.test_nothing_waits_for_the_device("cuda", CASE_OF[name])
    assert gpu.sync_debug_mode == 0
    test_devices.test_the_current_stream_is_used("cuda", CASE_OF[name])
    assert gpu.order == ["synchronize", "stream", "sleep", "synchronize"]
    test_devices.test_a_captured_graph_runs_again_on_other_numbers("cuda", CASE_OF[name])
    assert gpu.order[4:] == ["wait", "stream", "wait", "capture"]


def test_the_stand_in_finds_what_waits_and_what_a_graph_misses(gpu: Gpu) -> None:
    numbers = torch.arange(3.0, device="cuda")
    assert (numbers.device.type, numbers.is_cuda) == ("cuda", True)
    with pytest.raises(WaitedError, match=r"_local_scalar_dense.* waits for the device"), no_synchronization("cuda"):
        numbers.sum().item()
    with pytest.raises(WaitedError, match="nonzero"):
        captured("cuda", lambda: [numbers.nonzero()])
    assert numbers.sum().item() == 3.0
    kept: list[float] = []

    def doubled() -> list[torch.Tensor]:
        if not kept:
            kept.append(float(numbers[1]))
        return [numbers * 2, numbers * kept[0]]

    replay = captured("cuda", doubled)
    numbers += 3
    assert [part.tolist() for part in replay()] == [[6.0, 8.0, 10.0], [3.0, 4.0, 5.0]]


def test_launches_are_counted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = of_gpus_alone("test_launches")

    def kernels(*names: str) -> Any:
        def launched(call: Any) -> list[str]:
            call()
            return [
                f"void itm_fast::cuda::(anonymous namespace)::{name}_kernel<float>(Problem<float>)" for name in names
            ]

        return launched

    noted: dict[str, int] = {}
    monkeypatch.setattr(tests, "launched", kernels("one"))
    tests.test_an_operator_launches_few_kernels("cuda", ONE_LAUNCH_STEP, noted.__setitem__)
    names = {
        "cross_attention_scores",
        "cross_attention_scores_backward",
        "triplet_loss_with_gradient",
        "scale_gradient",
    }
    assert noted == {f"launches of {name} at {size}": 1 for name in names for size in (9, 70)}
    for wrong in ((), ("one", "two", "three")):
        monkeypatch.setattr(tests, "launched", kernels(*wrong))
        with pytest.raises(AssertionError):
            tests.test_an_operator_launches_few_kernels("cuda", CASE_OF["retrieval_ranks"], noted.__setitem__)

    monkeypatch.setattr(tests, "past_the_room", lambda: past_the_room(rows=5))
    steps = ("list_pairs", "backpropagate_pairs")
    monkeypatch.setattr(tests, "launched", kernels(*steps))
    tests.test_pairs_past_the_room_take_no_more_launches()
    monkeypatch.setattr(tests, "launched", kernels(*steps, "finish_pairs"))
    with pytest.raises(AssertionError):
        tests.test_pairs_past_the_room_take_no_more_launches()


def test_all_work_of_a_step_is_counted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = of_gpus_alone("test_launches")
    kernels = ("prepare_scores", "matching_loss", "scale_gradient", "list_pairs", "backpropagate_pairs")
    names = [f"void itm_fast::cuda::(anonymous namespace)::{name}_kernel<float>(Problem<float>)" for name in kernels]
    names += ["Memset (Device)"] * 2

    def launched(call: Callable[[], Any], _: Any) -> list[str]:
        call()
        return names

    monkeypatch.setattr(tests, "launched", launched)
    tests.test_a_step_is_five_kernels_and_two_fills("t2i")
    for more in ("Memcpy DtoD (Device -> Device)", "void at::native::elementwise_kernel<128>(int)", names[-1]):
        names.append(more)
        with pytest.raises(AssertionError):
            tests.test_a_step_is_five_kernels_and_two_fills("t2i")
        names.pop()


def test_a_limit_of_launches_stands_there_for_every_cuda_kernel() -> None:
    assert set(of_gpus_alone("test_launches").AT_MOST) == check_cuda_library.implemented(ROOT / "csrc/cuda")


def test_the_profiler_is_asked_after_a_call_that_is_not_counted(gpu: Gpu) -> None:
    calls: list[int] = []
    assert launched(lambda: calls.append(len(calls))) == []  # A CPU runs no GPU kernels.
    assert calls == [0, 1]
    assert gpu.order.count("synchronize") >= 2  # The profiler also synchronises.


def test_the_comparison_of_wrappers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the CPU bodies with themselves, then with a wrong body."""
    tests = of_gpus_alone("test_wrappers")
    library = compile_driver("wrappers", tmp_path)
    host = Wrappers(library)
    for name in WRAPPERS:
        tests.test_a_wrapper_does_what_its_body_on_the_cpu_does(library, host, name)

    class Wrong(Wrappers):
        def run(self, name: str, given: np.ndarray, out: np.ndarray, seed: int = 0) -> np.ndarray:
            found = super().run(name, given, out, seed)
            found[-1] ^= 1
            return found

    monkeypatch.setattr(tests, "Wrappers", Wrong)
    with pytest.raises(AssertionError):
        tests.test_a_wrapper_does_what_its_body_on_the_cpu_does(library, host, "mma_bf16")

    checked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tests, "ProductKernels", lambda library: library)
    monkeypatch.setattr(tests, "check_product", lambda *sizes, **options: checked.append((*sizes, *options.values())))
    tests.test_a_whole_product_is_exact(library, half=True, transposed=False)
    assert checked[0] == (library, 1, 8, 8, False, True, 0)
    assert len(checked) == 4


class QuietMeter(CudaMeter):
    FLUSH_BYTES = 16


def test_the_benchmark_of_a_gpu_runs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.machine._driver_version", lambda: "580.1")
    results = json.loads(json.dumps(benchmark.run(benchmark.PRESETS["dry"], QuietMeter())))
    assert results["dry_run"] is False
    assert results["device"] == {
        "type": "cuda",
        "name": NAME,
        "capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 143771 << 20,
        "driver": "580.1",
        "cuda": torch.version.cuda,
    }
    assert (results["failed"], results["not_built"], results["not_run"]) == ({}, {}, [])
    graphs, of_losses = {"native graph", "native bf16 graph"}, {"native graph"}
    for name, found in results["workloads"].items():
        variants = found["variants"]
        graphed = {
            **dict.fromkeys(("scores", "step", "matching", "long", "regulated", "maxsim"), graphs),
            **dict.fromkeys(("loss", "boosting", "ranks"), of_losses),
        }
        assert {variant for variant in variants if variant.endswith("graph")} == graphed.get(name.split()[0], set())
        for variant, figures in variants.items():
            assert 0 < figures["min_s"] <= figures["median_s"] <= figures["max_s"]
            keys = {"flop_per_s", "bytes_per_s", "share_of_gemm", "share_of_copy"}
            assert keys & set(figures) == (keys if variant.startswith("native") else set())
    assert {"flop_per_s", "median_s", "min_s", "max_s"} <= set(results["ceilings"]["gemm_bf16"])
    # The page of the cost model accepts these results.
    check_is_of_a_gpu(results, "r.json")
    assert tables([results]).startswith("Measured on H200; elsewhere the kernels are compiled")


def test_memory_is_asked_of_the_gpu(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark program measures peak memory, and stops at its time limit with the results so far."""
    small = replace(benchmark.PRESETS["dry"], memory=True)
    monkeypatch.setattr(gpu_bench, "PRESETS", {"small": small})
    monkeypatch.setattr(gpu_bench, "CudaMeter", QuietMeter)
    for limit, workloads in (("1000", 20), ("-1", 0)):
        file = tmp_path / f"{workloads}.json"
        monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "small", str(file), limit])
        gpu_bench.main()
        results = json.loads(file.read_text())
        assert len(results["workloads"]) == workloads
        assert len(results["not_run"]) == 20 - workloads
        for found in results["workloads"].values():
            measured = [figures for figures in found["variants"].values() if len(figures["runs_s"]) > 1]
            assert {figures["peak_bytes"] for figures in measured} <= {1 << 20}


def test_what_the_sanitizer_watches_runs(
    gpu: Gpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[torch.dtype] = []
    with monkeypatch.context() as patch:
        patch.setattr(gpu_operators, "run_case", lambda functions, case, inputs: ran.append(inputs[0].dtype))
        gpu_operators.main("cuda", "first")
    assert ran == [case.dtypes[0] for case in CASES]
    capsys.readouterr()
    gpu_operators.main()
    assert capsys.readouterr().out == f"{len(CASES)} operators ran: {', '.join(case.name for case in CASES)}\n"
    assert gpu.order == ["synchronize", "synchronize"]
    assert devices.built(("triplet_loss_with_gradient",), "cuda")
