"""The tables of docs/performance/predictions.md: the cost model for several GPUs, with measurements on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks import costs, dense_costs, kernel_times, kernels, maxsim_costs
from benchmarks.costs import DEVICES, Cost
from benchmarks.gpu_table import check_is_of_a_gpu
from benchmarks.kernels import BOOSTING, GPUS, Work, predict, repeated
from benchmarks.maxsim_costs import MAXSIM_SIZES
from benchmarks.maxsim_workloads import MaxsimSizes
from benchmarks.units import amount, seconds
from itm_fast.benchmarking.table import table
from itm_fast.benchmarking.workloads import caption_lengths

__all__ = ["NOT_RUN", "WORKLOADS", "tables"]

NOT_RUN = "not run on a GPU yet"
SIMULATED = "No CUDA kernel of this project has run on a GPU yet: they are"
# Seconds per pair of the published loops on GPUs of their time (docs/internals/design.md, section 1).
PUBLISHED_PER_PAIR = (3e-6, 55e-6)


@attrs.frozen
class Workload:
    """A line of the tables.

    Attributes:
        measured_as: its name in the benchmark.
        steps: how many of the measured steps it takes.
    """

    title: str
    work: Work
    measured_as: str
    steps: float = 1.0

    @property
    def cost(self) -> Cost:
        return self.work.cost


def _maxsim(sizes: MaxsimSizes) -> tuple[Workload, Workload]:
    sets = f"{sizes.captions} x {sizes.images} sets of {sizes.words} x {sizes.patches} rows, d = {sizes.dim}"
    measured_as = f"{sizes.words} x {sizes.patches}"
    return (
        Workload(f"MaxSim scores, {sets}", maxsim_costs.scores(sizes), f"maxsim scores {measured_as}"),
        Workload(f"MaxSim hardest-negative step, {sets}", maxsim_costs.step(sizes), f"maxsim step {measured_as}"),
    )


def _long_scores(patches: int) -> Workload:
    sets = f"64 x 64 sets of 64 x {patches} rows, d = 512"
    work = kernels.long_scores(64, 64, patches, words=64, dim=512)
    return Workload(f"scores, {sets}", work, f"long scores 64 x {patches}")


def _long_step(patches: int) -> Workload:
    sets = f"64 x 64 sets of 64 x {patches} rows, d = 512"
    work = kernels.long_step(64, patches, words=64, dim=512)
    return Workload(f"hardest-negative step, {sets}", work, f"long step 64 x {patches}")


STEPS_OF_EPOCH = costs.EPOCH_IMAGES * costs.EPOCH_CAPTIONS / 128
WORKLOADS = (
    Workload("scores, 128 x 128", kernels.scores(128, 128), "scores 128"),
    Workload("scores, 1024 x 1024", kernels.scores(1024, 1024), "scores 1024"),
    *map(_long_scores, (196, 576)),
    Workload("hardest-negative step, separate calls, B = 128", kernels.step(128), "step 128"),
    Workload("hardest-negative step, `matching_loss`, B = 128", kernels.matching_step(128), "matching step 128"),
    Workload("step over all negatives, B = 128", dense_costs.step(128), "step all 128"),
    *map(_long_step, (196, 576)),
    Workload("RCAR scores, 128 x 128", kernels.regulated_scores(128, 128), "regulated scores 128"),
    Workload("RCAR scores, 1024 x 1024", kernels.regulated_scores(1024, 1024), "regulated scores 1024"),
    Workload("RCAR hardest-negative step, B = 128", kernels.regulated_step(128), "regulated step 128"),
    Workload(
        "RCAR step over all negatives, B = 128", kernels.regulated_step(128, partners=128), "regulated step all 128"
    ),
    *(workload for sizes in MAXSIM_SIZES for workload in _maxsim(sizes)),
    *(
        Workload(f"triplet loss and gradient, B = {batch}", kernels.loss(batch), f"loss hardest {batch}")
        for batch in (128, 4096, 8192)
    ),
    Workload("triplet loss of SelHN and gradient, B = 4096", kernels.loss(4096), "loss selective 4096"),
    Workload("boosting loss and gradient, B = 4096", kernels.loss(4096, BOOSTING), "boosting hardest 4096"),
    Workload("ranks, 5000 x 25000", kernels.ranks(5000, 25000), "ranks 5000 x 25000"),
    Workload("COCO-5K evaluation, 5000 x 25000", kernels.evaluation(5000, 25000), "evaluation 5000 x 25000"),
    Workload(
        "one COCO epoch, 4,425 steps with `matching_loss`, B = 128",
        repeated(kernels.matching_step(128), STEPS_OF_EPOCH),
        "matching step 128",
        STEPS_OF_EPOCH,
    ),
)


def tables(results: Sequence[Mapping[str, Any]], times: Mapping[str, Any] | None = None) -> str:
    """Render all tables.

    Args:
        results: those of benchmarks on GPUs, at most one for each of `DEVICES`.
        times: those of the kernels on a GPU, for workloads that no benchmark has measured.
    """
    measured: dict[str, Mapping[str, Any]] = {}
    for result in results:
        check_is_of_a_gpu(result, "a result")
        device = costs.device_of(result["device"]["name"])
        if device is None or device in measured:
            raise ValueError(f"expected one result for each of {', '.join(DEVICES)}, got '{result['device']['name']}'")
        measured[device] = result
    timed = {} if times is None else {costs.device_of(times["device"]["name"]): kernel_times.fastest(times)}
    ran = [name for name in DEVICES if name in measured or name in timed]
    run = f"Measured on {', '.join(ran)}; elsewhere the kernels are" if ran else SIMULATED
    parts = [
        f"{run} compiled, and [simulated](../internals/shim.md) by the tests.",
        _devices(),
        _workloads(),
        *(_floors(name, measured.get(name), timed.get(name, {})) for name in DEVICES),
    ]
    parts += [_kernels("H200"), _consequences()]
    return "\n\n".join(parts) + "\n"


def _devices() -> str:
    header = ["device", "bf16 products", "of these by `mma.sync`", "float32", "memory", "products per byte"]
    rows = [[*header, "multiprocessors", "clock", "L2 cache, bytes per cycle", "source"]]
    for name, peaks in DEVICES.items():
        gpu = GPUS[name]
        rows.append(
            [
                name,
                f"{peaks.tensor / 1e12:g} TFLOP/s",
                f"{100 * gpu.mma_share:.0f} %",
                f"{peaks.other / 1e12:g} TFLOP/s",
                f"{peaks.memory / 1e12:g} TB/s",
                f"{peaks.tensor / peaks.memory:.0f}",
                str(gpu.cores),
                f"{kernels.clock(name) / 1e9:.2f} GHz",
                f"{gpu.cache:,}",
                peaks.source,
            ]
        )
    return table(rows)


def _workloads() -> str:
    rows = [["workload", "products", "float32 operations", "bytes", "products per byte", "launches"]]
    for workload in WORKLOADS:
        cost = workload.cost
        rows.append(
            [
                workload.title,
                amount(cost.tensor, "FLOP") if cost.tensor else "none",
                amount(cost.other, "FLOP"),
                amount(cost.bytes, "B"),
                f"{cost.tensor / cost.bytes:.0f}",
                f"{cost.launches:,}",
            ]
        )
    return table(rows)


def _floors(name: str, measured: Mapping[str, Any] | None, timed: Mapping[str, tuple[float, str]]) -> str:
    peaks = DEVICES[name]
    rows = [[f"on {name}", "products", "memory", "the larger floor", "predicted", "up to", "bound by", "reached"]]
    slower: list[float] = []
    for workload in WORKLOADS:
        tensor, memory = costs.floors(workload.cost, peaks)
        bound = "products" if tensor > memory else "memory"
        prediction = predict(workload.work, name)
        share = 100 * prediction.parts[prediction.bound] / prediction.seconds
        rows.append(
            [
                workload.title,
                seconds(tensor) if tensor else "none",
                seconds(memory),
                f"{seconds(max(tensor, memory))} ({bound})",
                seconds(prediction.seconds),
                seconds(prediction.longest),
                f"{prediction.bound}, {share:.0f} %",
                _reached(workload, measured, timed, max(tensor, memory)),
            ]
        )
        if measured is None and workload.measured_as in timed:
            slower.append(workload.steps * timed[workload.measured_as][0] / prediction.seconds)
    if not slower:
        return table(rows)
    return f"{table(rows)}\n\nKernels on {name} take {min(slower):.1f} to {max(slower):.1f} times as long as predicted."


def _consequences() -> str:
    """Summarise the predictions in sentences."""
    evaluation, step = kernels.evaluation(5000, 25000), kernels.matching_step(128)
    epoch = repeated(step, STEPS_OF_EPOCH)
    times = [f"{seconds(predict(evaluation, name).seconds)} on {name}" for name in DEVICES]
    epochs = [f"{seconds(predict(epoch, name).seconds)} on {name}" for name in DEVICES]
    pairs = 5000 * 25000
    low, high = (pairs * per_pair for per_pair in PUBLISHED_PER_PAIR)
    encoders, encoding = costs.encoders(128), predict(kernels.encoders(128), "H200").seconds
    read, read_in_all = amount(encoders.bytes, "B"), amount(encoders.bytes * STEPS_OF_EPOCH, "B")
    return (
        f"- A COCO-5K evaluation scores {pairs / 1e6:.0f} million pairs. Published code takes 3 to 55 µs per pair, "
        f"{seconds(low)} to {seconds(high)} in all. Predicted here, after encoding: {', '.join(times)}. Only the "
        "scores, 500 MB, are kept.\n"
        f"- The steps of an epoch are predicted to take {', '.join(epochs)}, without encoders. SCAN's encoders need "
        f"{amount(encoders.tensor, 'FLOP')} per step, {encoders.tensor / step.cost.tensor:.0f} times as much as the "
        f"products of the scores, and read {read} of features per step, {read_in_all} per epoch. At the peak of an "
        f"H200 they take {seconds(encoding)} per step, and the scores, the loss and their gradients "
        f"{seconds(predict(step, 'H200').seconds)}.\n"
        f"{_all_negatives()}\n"
        f"{_long_epilogue('H200')}\n"
        f"- {_blocks('a COCO-5K evaluation', 5000, 25000)} {_blocks('a batch of 128', 128, 128)}"
    )


def _all_negatives() -> str:
    """Compare blocks of scores with lists of pairs, and the ordinary units with tensor cores."""
    blocks = dense_costs.backward(128)
    totals, products, shares = [], [], []
    for name in DEVICES:
        total, steps = predict(blocks, name).seconds, dense_costs.tile_seconds(128, name)
        others = sum(steps.values()) - steps["block product"]
        totals.append(f"{seconds(total)} on {name}")
        listed = seconds(dense_costs.listed_seconds(128, name))
        products.append(f"{seconds(total - others)} instead of {listed} on {name}")
        then = dense_costs.on_tensor_cores(128, name)
        gain = sum(max(steps[loop] - after, 0.0) for loop, after in then.items())
        shares.append(f"{100 * gain / total:.0f} % on {name}")
    return (
        f"- The backward over all negatives at B = 128 is predicted to take {', '.join(totals)}, in blocks of scores. "
        "The softmax over the regions and its gradient are not counted. Of lists of pairs only products of rows are "
        f"counted. With these alone, blocks take {', '.join(products)}.\n"
        "- In blocks, products with Gram matrices and the terms of M are on the ordinary units. In two bfloat16 parts "
        f"on tensor cores they would save at most {', '.join(shares)} of the backward, less the time to split float32."
    )


def _long_epilogue(name: str) -> str:
    """Name the instructions beside the products of sets that are longer than a tile."""
    launch = next(one for one in kernels.long_scores(64, 64, 196, 64, 512).counted if one.kernel == kernels.LONG_SCORES)
    issued = {
        loop: kernels.counts_of(launch.kernel, loop, name)["instructions"] * units
        for loop, units in launch.work.items()
    }
    loops = ("norms", "raw scores", "attention", "statistics")
    cells = launch.work["norms"]
    parts = ", ".join(f"{loop} {issued[loop] / cells:.0f}" for loop in loops)
    of_epilogue = sum(issued[loop] for loop in loops)
    busy = kernels.times(launch, name)
    return (
        f"- Scores with 196 patches keep the issue slots of an {name} busy for {seconds(busy['issue slots'])}, its "
        f"tensor cores for {seconds(busy['tensor cores'])}. For 32 raw scores a warp issues "
        f"{of_epilogue / cells:.0f} instructions beside the products ({parts}), "
        f"{100 * of_epilogue / sum(issued.values()):.0f} % of all."
    )


def _kernels(name: str) -> str:
    """Render what keeps each unit of a GPU busy, for the first workload of every kernel above the size of a launch."""
    units = [bound for bound in kernels.BOUNDS if bound in kernels.times(WORKLOADS[0].work.counted[0], name)]
    rows = [[f"kernel on {name}", "workload", *units]]
    seen = set()
    for workload in WORKLOADS:
        for launch in workload.work.counted:
            busy = kernels.times(launch, name)
            if launch.kernel not in seen and max(busy.values()) > kernels.LAUNCH_SECONDS:
                seen.add(launch.kernel)
                cells = [seconds(busy[unit]) if busy[unit] else "" for unit in units]
                rows.append([f"`{launch.kernel.partition('<')[0]}`", workload.title, *cells])
    return table(rows)


def _blocks(what: str, images: int, captions: int) -> str:
    """Describe the thread blocks of a workload's scores, with the benchmark's caption lengths."""
    lengths = caption_lengths(captions).tolist()
    working, room = costs.pairs_of_tiles([costs.REGIONS] * images, lengths)
    return (
        f"The sets of {what} fill {working:,} pairs of tiles. {room:,} thread blocks are launched, the maximum for "
        f"this number of sets and rows; {room - working:,} return at once."
    )


def _reached(
    workload: Workload, measured: Mapping[str, Any] | None, timed: Mapping[str, tuple[float, str]], floor: float
) -> str:
    """Render the fastest native variant on 16-bit inputs, or on scores, with the share of its floor."""
    if measured is None and workload.measured_as in timed:
        of_a_step, build = timed[workload.measured_as]
        kernels_alone = workload.steps * of_a_step
        older = f" (build: {build})" if build else ""
        return f"**{seconds(kernels_alone)}** in kernels{older}, floor / time {100 * floor / kernels_alone:.0f} %"
    if measured is None:
        return "not measured" if timed else NOT_RUN
    found = measured["workloads"].get(workload.measured_as, {"variants": {}})["variants"]
    of_vectors = workload.measured_as.startswith(
        ("scores", "step", "matching", "long", "regulated", "maxsim", "evaluation")
    )
    natives = {
        name: workload.steps * figures["median_s"]
        for name, figures in found.items()
        if name.startswith("native bf16" if of_vectors else "native")
    }
    if not natives:
        missing = measured["not_built"].get(workload.measured_as)
        return f"not built: {', '.join(missing)}" if missing else "not run"
    name = min(natives, key=lambda key: natives[key])
    graph = " as a CUDA graph" if name.endswith("graph") else ""
    return f"**{seconds(natives[name])}**{graph}, floor / time {100 * floor / natives[name]:.0f} %"
