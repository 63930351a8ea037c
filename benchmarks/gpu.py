"""The benchmark of a GPU: times compared with the cost model, and with what the GPU reaches in the same run.

Inside: `run`, `PRESETS`, `ceilings`. Workloads, variants and the way they are measured are those of the CPU benchmark.
A run on the CPU ("dry") takes the same path with small sizes; its results are marked as not measured on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import costs, dense_costs, gpu_workloads, maxsim_costs
from benchmarks import maxsim_workloads as maxsim
from benchmarks.costs import Cost
from benchmarks.gpu_workloads import PATCH_SIZES, make_ranks
from benchmarks.long_sets import PatchSizes
from benchmarks.machine import described_device
from benchmarks.maxsim_costs import MAXSIM_SIZES
from benchmarks.maxsim_workloads import MaxsimSizes
from itm_fast.benchmarking import regulated, workloads
from itm_fast.benchmarking.measure import Meter
from itm_fast.benchmarking.run import compiler_found, measure_variants
from itm_fast.benchmarking.workloads import Sizes
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info, operators_of

__all__ = ["FORMAT_VERSION", "KIND", "PRESETS", "GpuPreset", "ceilings", "run"]

FORMAT_VERSION = 1
KIND = "itm_fast GPU benchmark"
GIB = 1 << 30

# The kernels that a workload's native variants need. If one is missing, they are "not built".
SCORING = ("cross_attention_scores",)
STEPPING = (*SCORING, "cross_attention_scores_backward", "triplet_loss", "triplet_loss_backward")
REGULATING = ("regulated_scores",)
MAXSIM = ("maxsim_scores",)
NEEDED = {
    "make_scores": SCORING,
    "make_step": STEPPING,
    "make_matching_step": ("matching_loss", "cross_attention_scores_backward"),
    "make_long_scores": SCORING,
    "make_long_step": STEPPING,
    "make_regulated_scores": REGULATING,
    "make_regulated_step": (*REGULATING, "regulated_scores_backward", "triplet_loss", "triplet_loss_backward"),
    "make_maxsim_scores": MAXSIM,
    "make_maxsim_step": (*MAXSIM, "maxsim_scores_backward", "triplet_loss", "triplet_loss_backward"),
    "make_loss": ("triplet_loss", "triplet_loss_backward"),
    "make_boosting": ("boosting_loss", "boosting_loss_backward"),
    "make_ranks": ("retrieval_ranks",),
    "make_evaluation": (*SCORING, "retrieval_ranks"),
}

# Kinds of losses, with the negatives of each measurement.
LOSSES = (
    ("loss", workloads.make_loss, costs.loss, ("hardest", "all", "selective")),
    ("boosting", workloads.make_boosting, costs.boosting_loss, ("hardest", "all")),
)

# Results compared with float64, and the largest batch to compare.
ACCURACIES: dict[str, tuple[Callable[..., dict[str, float]], int]] = {
    "make_scores": (workloads.accuracy, 128),
    "make_long_scores": (gpu_workloads.long_accuracy, 128),
    "make_regulated_scores": (regulated.accuracy, 128),
    "make_maxsim_scores": (maxsim.accuracy, 128),
    "make_loss": (partial(workloads.loss_accuracy, "triplet"), 4096),
    "make_boosting": (partial(workloads.loss_accuracy, "boosting"), 4096),
}


@dataclass(frozen=True)
class GpuPreset:
    """How much is measured.

    Attributes:
        galleries: images and captions of evaluations, and whether the loop and the packed form evaluate them, too.
        runs, loop_runs: at most; a variant that takes long runs less often, see `SECONDS_OF_RUNS`.
        product: rows, columns and depth of the matrix product that measures the GPU's peak.
        compiled: also the packed form under torch.compile.
        slow: also what takes long: native variants in further precisions, the loop at the largest batch.
    """

    batches: tuple[int, ...]
    step_batch: int
    dim: int
    loss_batches: tuple[int, ...]
    galleries: tuple[tuple[int, int, bool], ...]
    runs: int
    loop_runs: int
    product: int
    copied_bytes: int
    compiled: bool = True
    slow: bool = True
    memory: bool = True
    maxsim: tuple[MaxsimSizes, ...] = MAXSIM_SIZES
    patches: tuple[PatchSizes, ...] = PATCH_SIZES


# Seconds for the runs of a variant, unless the fewest runs take longer.
SECONDS_OF_RUNS, FEWEST_RUNS = 0.5, 3

PRESETS = {
    "full": GpuPreset(
        *((128, 1024), 128, 1024, (128, 4096, 8192), ((5000, 25000, True),), 30, 5),
        product=8192,
        copied_bytes=GIB,
    ),
    "quick": GpuPreset(
        *((128, 1024), 128, 1024, (128, 4096, 8192), ((1000, 5000, True), (5000, 25000, False)), 10, 3),
        product=8192,
        copied_bytes=GIB,
        compiled=False,
        slow=False,
    ),
    "dry": GpuPreset(
        *((4,), 4, 16, (8,), ((2, 10, True), (3, 15, False)), 2, 1),
        product=64,
        copied_bytes=1 << 16,
        compiled=False,
        memory=False,
        maxsim=(MaxsimSizes(4, 4, 16, words=3, patches=5),),
        patches=(PatchSizes(4, 16, patches=7, tokens=3),),
    ),
}


@dataclass(frozen=True)
class _Workload:
    name: str
    make: Callable[..., Callable[[], Any]]
    arguments: tuple[Any, ...]
    cost: Callable[[int], Cost]  # of vectors whose components have this many bytes
    baselines: dict[str, int]  # variant to number of runs
    natives: tuple[str, ...]


def _workloads(preset: GpuPreset, device: str) -> list[_Workload]:
    runs, loop_runs = preset.runs, preset.loop_runs
    packed = {"packed": runs, "packed bf16": runs}
    if preset.compiled and compiler_found():
        packed |= {"packed compiled": runs, "packed bf16 compiled": runs}
    # A CUDA graph shows the time of the kernels without Python's overhead.
    graph = ("native graph", "native bf16 graph") if device == "cuda" else ()
    natives = ("native", "native high", "native medium", "native bf16", *graph)
    if not preset.slow:
        natives = ("native", "native bf16", *graph[1:])
    found = []
    loop = {"loop": loop_runs, **packed}
    for batch in preset.batches:
        sizes, cost = Sizes(batch, batch, preset.dim, device), partial(costs.scores, batch, batch, preset.dim)
        beside = loop if preset.slow or batch <= preset.step_batch else packed
        found.append(_Workload(f"scores {batch}", workloads.make_scores, (sizes,), _of(cost), beside, natives))
    sizes = Sizes(preset.step_batch, preset.step_batch, preset.dim, device)
    cost = partial(costs.step, preset.step_batch, preset.dim)
    found.append(_Workload(f"step {preset.step_batch}", workloads.make_step, (sizes,), _of(cost), loop, natives))
    cost, make = partial(costs.matching_step, preset.step_batch, preset.dim), gpu_workloads.make_matching_step
    found.append(_Workload(f"matching step {preset.step_batch}", make, (sizes,), _of(cost), packed, natives))
    cost = partial(dense_costs.step_cost, preset.step_batch, preset.dim)
    of_all = (sizes, "all")
    found.append(_Workload(f"step all {preset.step_batch}", workloads.make_step, of_all, _of(cost), packed, natives))
    found += _regulated_workloads(preset, device, natives)
    sides = {"packed": runs, "packed bf16": runs}
    for long in preset.patches:
        name, arguments = f"long scores {long.tokens} x {long.patches}", (replace(long, device=device),)
        cost = partial(costs.scores, long.batch, long.batch, long.dim, long.tokens, regions=long.patches)
        make = gpu_workloads.make_long_scores
        found.append(_Workload(name, make, arguments, _of(cost), {"loop": loop_runs, **sides}, natives))
        name, cost = (
            f"long step {long.tokens} x {long.patches}",
            partial(costs.step, long.batch, long.dim, long.tokens, regions=long.patches),
        )
        found.append(_Workload(name, gpu_workloads.make_long_step, arguments, _of(cost), sides, natives))
    for size in preset.maxsim:
        sized, label = (replace(size, device=device),), f"{size.words} x {size.patches}"
        cost, of_step = partial(maxsim_costs.scores_cost, size), partial(maxsim_costs.step_cost, size)
        make, make_step = maxsim.make_maxsim_scores, maxsim.make_maxsim_step
        baselines = {"loop": loop_runs, **sides}
        found.append(_Workload(f"maxsim scores {label}", make, sized, _of(cost), baselines, natives))
        found.append(_Workload(f"maxsim step {label}", make_step, sized, _of(of_step), baselines, natives))
    plain, of_scores = {"plain": runs}, ("native", *graph[:1])
    for batch in preset.loss_batches:
        for kind, make, cost_of, minings in LOSSES:
            for mining in minings:
                name, arguments = f"{kind} {mining} {batch}", (batch, mining, device)
                found.append(_Workload(name, make, arguments, _fixed(cost_of(batch)), plain, of_scores))
    for images, captions, with_baselines in preset.galleries:
        sizes, label = Sizes(images, captions, preset.dim, device), f"{images} x {captions}"
        fixed = _fixed(costs.ranks(images, captions))
        found.append(_Workload(f"ranks {label}", make_ranks, (sizes,), fixed, plain, of_scores))
        # The loop and the packed form take minutes for the largest gallery, so they run once.
        once = {"loop": 1, "packed bounded": 1} if with_baselines else {}
        evaluating = ("native", "native high", "native bf16") if with_baselines else ("native bf16",)
        cost = partial(costs.evaluation, images, captions, preset.dim)
        make_evaluation = workloads.make_evaluation
        found.append(_Workload(f"evaluation {label}", make_evaluation, (sizes,), _of(cost), once, evaluating))
    return found


def _regulated_workloads(preset: GpuPreset, device: str, natives: tuple[str, ...]) -> list[_Workload]:
    """Return the workloads of RCAR."""
    sides = {"packed": preset.runs, "packed bf16": preset.runs}
    baselines = {"loop": preset.loop_runs, **sides}
    make, found = regulated.make_regulated_scores, []
    for batch in preset.batches:
        sizes, cost = Sizes(batch, batch, preset.dim, device), partial(costs.regulated_scores, batch, batch, preset.dim)
        if batch <= preset.step_batch:
            beside, measured = baselines, natives
        else:  # A run takes seconds.
            beside, measured = {}, ("native", "native bf16") if preset.slow else ("native bf16",)
        found.append(_Workload(f"regulated scores {batch}", make, (sizes,), _of(cost), beside, measured))
    batch, step = preset.step_batch, regulated.make_regulated_step
    sizes = Sizes(batch, batch, preset.dim, device)
    for label, mining, partners, beside in (("", "hardest", 3, baselines), (" all", "all", batch, sides)):
        name, cost = f"regulated step{label} {batch}", partial(costs.regulated_step, batch, preset.dim)
        of_mining = _of(partial(cost, partners=partners))
        found.append(_Workload(name, step, (sizes, mining), of_mining, beside, natives))
    return found


def _of(cost: Callable[..., Cost]) -> Callable[[int], Cost]:
    return lambda element: cost(element=element)


def _fixed(cost: Cost) -> Callable[[int], Cost]:
    return lambda _: cost


def run(
    preset: GpuPreset,
    meter: Meter,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Measure everything in `preset` on the meter's device.

    Args:
        save: called with the results so far after every workload, so that an interrupted run keeps what it measured.
        limit_s: start no workload after this many seconds; workloads left out are listed.

    Returns:
        The content of the JSON file: "device", "environment", "ceilings", and for each workload its cost and the times
        of each variant. Native variants also have operations and bytes per second at the median, with their shares of
        `ceilings`. "not_built" names missing kernels of a workload's native variants, "failed" the variants that
        raised, by workload, with their messages, "not_run" what the time limit left out.
    """
    began = time.monotonic()
    info = build_info()
    results: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "dry_run": meter.device != "cuda",
        "device": described_device(meter.device),
        "environment": environment(torch.get_num_threads(), info),
        "preset": asdict(preset),
        "ceilings": ceilings(preset, meter),
        "workloads": {},
        "not_built": {},
        "failed": {},
        "not_run": [],
    }
    registered = operators_of(meter.device)
    for workload in _workloads(preset, meter.device):
        if time.monotonic() - began > limit_s:
            results["not_run"].append(workload.name)
            continue
        missing = [name for name in NEEDED[workload.make.__name__] if name not in registered]
        natives = () if missing else workload.natives
        if missing:
            results["not_built"][workload.name] = missing
        found, failed = _measured(workload, natives, preset, meter, progress, results["ceilings"])
        results["workloads"][workload.name] = found
        if failed:
            results["failed"][workload.name] = failed
        save(results)
    save(results)
    return results


def _measured(
    workload: _Workload,
    natives: tuple[str, ...],
    preset: GpuPreset,
    meter: Meter,
    progress: Callable[[str], None],
    reached: dict[str, dict[str, float]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return figures of the variants that run, and the errors of the others: too little memory, no compiler."""

    def make(variant: str, *arguments: Any, small: bool = False) -> Callable[[], Any]:
        call = workload.make(variant.removesuffix(" graph"), *arguments, small=small)
        return graphed(call) if variant.endswith(" graph") else call

    make.__name__ = workload.make.__name__
    failed: dict[str, str] = {}
    repeats = {**workload.baselines, **dict.fromkeys(natives, preset.runs)}
    for variant, count in [(name, count) for name, count in repeats.items() if count > 1]:
        progress(f"{workload.name}: first runs of {variant}")
        try:
            seconds = _seconds_of(make(variant, *workload.arguments), meter)
        except Exception as error:
            failed[variant] = f"{type(error).__name__}: {error}".splitlines()[0]
            del repeats[variant]
            continue
        repeats[variant] = min(count, max(FEWEST_RUNS, int(SECONDS_OF_RUNS / max(seconds, 1e-9))))
    found = measure_variants(make, repeats, workload.arguments, meter=meter, memory=preset.memory, progress=progress)
    found["cost"] = asdict(workload.cost(2))
    for variant, figures in found["variants"].items():
        if variant in natives:
            figures |= rates(workload.cost(2 if "bf16" in variant else 4), figures["median_s"], reached)
        if not variant.endswith((" graph", " compiled")):
            figures |= _accuracy(workload, variant)
    return found, failed


def _seconds_of(call: Callable[[], Any], meter: Meter) -> float:
    """Return the seconds of the second call; the first one may compile."""
    call()
    return meter.time_of(call)


def _accuracy(workload: _Workload, variant: str) -> dict[str, Any]:
    """Compare the variant with float64 if the workload is small enough."""
    accuracy, most = ACCURACIES.get(workload.make.__name__, (None, 0))
    size, *_ = workload.arguments
    count = size.captions if isinstance(size, Sizes) else size.batch if isinstance(size, PatchSizes) else size
    return {"accuracy": accuracy(variant, *workload.arguments)} if accuracy is not None and count <= most else {}


def rates(cost: Cost, seconds: float, reached: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return operations and bytes of the cost model per second, and their shares of the measured product and copy."""
    operations, moved = cost.operations / seconds, cost.bytes / seconds
    return {
        "flop_per_s": operations,
        "bytes_per_s": moved,
        "share_of_gemm": cost.tensor / seconds / reached["gemm_bf16"]["flop_per_s"],
        "share_of_copy": moved / reached["copy"]["bytes_per_s"],
    }


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    """Capture the call into a CUDA graph, after three runs on another stream, as capturing requires.

    The returned function holds the call, because the graph reads its inputs again.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], Any]) -> None:
    """Run the graph of the call `call`."""
    graph.replay()


def ceilings(preset: GpuPreset, meter: Meter) -> dict[str, dict[str, float]]:
    """Measure the device's peaks in this run: a bf16 product of random matrices, and a copy (bytes read and
    written)."""
    size = preset.product
    left, right = (torch.randn(size, size, device=meter.device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(-128, 127, (preset.copied_bytes,), dtype=torch.int8, device=meter.device)
    target = torch.empty_like(source)
    gemm, copied = costs.gemm(size, size, size).tensor, 2.0 * preset.copied_bytes
    found = {}
    calls: dict[str, tuple[Callable[[], Tensor], str, float]] = {
        "gemm_bf16": (lambda: torch.mm(left, right, out=product), "flop_per_s", gemm),
        "copy": (lambda: target.copy_(source), "bytes_per_s", copied),
    }
    for name, (call, rate, amount) in calls.items():
        for _ in range(3):
            call()
        times = [meter.time_of(call) for _ in range(max(2, preset.runs))]
        median = statistics.median(times)
        found[name] = {"median_s": median, "min_s": min(times), "max_s": max(times), rate: amount / median}
    return found
