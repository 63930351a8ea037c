"""Render a rehearsal at COCO's size as Markdown, using only its JSON.

Inside: `markdown`, `gpu_markdown`, `coco_steps`, `shares`, `projected`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.units import amount, seconds
from itm_fast.benchmarking.table import table
from itm_fast.data.layout import CAPTIONS_PER_IMAGE
from itm_fast.data.synthetic import COCO_IMAGES

__all__ = ["FORMAT_VERSION", "KIND", "coco_steps", "gpu_markdown", "markdown", "projected", "shares"]

FORMAT_VERSION = 2
KIND = "itm_fast COCO rehearsal"
# Goals: the maximum share of a step spent waiting for data, and the maximum growth of memory over an epoch.
MOST_WAITING, MOST_GROWTH = 0.05, 0.02


def coco_steps(batch: int, drop_last: bool) -> int:
    """Return the steps of an epoch on COCO's training captions."""
    captions = COCO_IMAGES["train"] * CAPTIONS_PER_IMAGE
    return captions // batch if drop_last else -(-captions // batch)


def shares(native: Mapping[str, Any]) -> dict[str, float]:
    """Return each phase's share of a step; shares add up to 1.

    The share of waiting for data is the median of the rounds, which synchronise only at the end. The remainder is
    divided as in the steps that synchronise after each phase.
    """
    waiting = statistics.median(native["waiting"])
    rest = {name: value for name, value in native["phases"].items() if name != "waiting"}
    total = sum(rest.values())
    return {"waiting": waiting, **{name: (1 - waiting) * value / total for name, value in rest.items()}}


def projected(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds of an epoch on COCO and of all epochs of the recipe, and those of the loop if it was measured.

    Steps of warm-up epochs use all negatives. The loop's steps take the same time with any loss, because its backward
    covers all pairs.
    """
    steps = coco_steps(measured["batch"], measured["drop_last"])
    epoch = steps * statistics.median(measured["native"]["seconds"])
    warm_up = measured["warm_up"]
    early = measured["warmup_epochs"] * (steps * statistics.median(warm_up["seconds"]) if warm_up else 0.0)
    found = {"epoch": epoch, "run": early + (measured["epochs"] - measured["warmup_epochs"]) * epoch}
    if measured["loop"]:
        loop = steps * statistics.median(measured["loop"]["seconds"])
        found |= {"loop_epoch": loop, "loop_run": measured["epochs"] * loop}
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Render the machine, the time of a step by phase, the time of an epoch, and the whole epoch."""
    if results["kind"] != KIND or results["format_version"] != FORMAT_VERSION or results["dry_run"]:
        raise ValueError(f"expected results of the kind {KIND!r} in format {FORMAT_VERSION}, and no dry run")
    parts = [_where(results), _steps(results["models"]), _projections(results["models"])]
    if results["epoch"] is not None:
        parts.append(_epoch(results))
    if results["not_run"]:
        parts.append(f"Not run because of the time limit: {', '.join(results['not_run'])}.")
    return "\n\n".join(parts) + "\n"


def gpu_markdown(results: Mapping[str, Any]) -> str:
    """`markdown` for a rehearsal on a GPU; ValueError if it ran on a CPU."""
    if results["device"]["type"] != "cuda":
        raise ValueError(f"measured without a GPU, on '{results['device']['name']}'")
    return markdown(results)


def _where(results: Mapping[str, Any]) -> str:
    where, plan = results["environment"], results["plan"]
    on_gpu = results["device"]["type"] == "cuda"
    share = (
        f"{results['images']:,} images of 36 x 2048 numbers in a bf16 store of {amount(results['store_bytes'], 'B')}"
    )
    machine = (
        results["device"]["name"] if on_gpu else f"{where['processor']}, {where['threads']} of {where['cores']} cores"
    )
    return (
        f"Measured on {where['date'][:10]} with `{where['command']}` on {machine}, torch {where['torch']}: {share}, "
        f"{100 * plan['scale']:g} % of COCO's. Load of the machine: {results['load_before']:.1f} before, "
        f"{results['load_after']:.1f} after. A step is the median of {plan['rounds']} rounds of {plan['steps']}, the "
        f"loop's of as many rounds of {plan['loop_steps']} in between; memory is the peak of the process"
        + (" and torch's peak on the GPU." if on_gpu else ".")
        + (" Shares are those of steps that synchronise with the GPU after each phase." if on_gpu else "")
    )


def _steps(models: Mapping[str, Any]) -> str:
    head = ["model", "step", "captions per second", "waiting for data", "batch", "encoders", "scores", "loss"]
    rows = [[*head, "optimiser", "peak memory"]]
    for label, measured in models.items():
        native = measured["native"]
        step = statistics.median(native["seconds"])
        peaks = [amount(native["peak_host_bytes"], "B")]
        if native["peak_device_bytes"] is not None:
            peaks.append(f"GPU {amount(native['peak_device_bytes'], 'B')}")
        cells = [f"{100 * share:.1f} %" for share in shares(native).values()]
        rows.append([label, seconds(step), f"{measured['batch'] / step:,.0f}", *cells, ", ".join(peaks)])
    return table(rows)


def _projections(models: Mapping[str, Any]) -> str:
    head = ["model", "an epoch of COCO", "published epochs", "all of them", "the loop: step", "an epoch", "all of them"]
    rows = [[*head, "itm_fast", "peak memory of the loop"]]
    for label, measured in models.items():
        found, loop = projected(measured), measured["loop"]
        epochs = str(measured["epochs"])
        if measured["warmup_epochs"]:
            epochs += f", {measured['warmup_epochs']} of them with all negatives"
        cells = [seconds(found["epoch"]), epochs, seconds(found["run"])]
        if loop is None:
            rows.append([label, *cells, "no loop", "", "", "", ""])
            continue
        step = statistics.median(loop["seconds"])
        faster = f"**{step / statistics.median(measured['native']['seconds']):.1f}x**"
        theirs = [seconds(step), seconds(found["loop_epoch"]), seconds(found["loop_run"])]
        rows.append([label, *cells, *theirs, faster, amount(loop["peak_host_bytes"], "B")])
    return table(rows)


def _memory(memory: Sequence[int]) -> str:
    """Render range and mean of the quarters that `growth` compares."""
    quarter = len(memory) // 4
    third, last = memory[-2 * quarter : -quarter], memory[-quarter:]
    ranges = [f"{amount(min(part), 'B')} to {amount(max(part), 'B')}" for part in (third, last)]
    means = [statistics.fmean(part) for part in (third, last)]
    return (
        f"It was {ranges[0]} in the third and {ranges[1]} in the last, "
        f"{amount(means[0], 'B')} and {amount(means[1], 'B')} on average ({100 * (means[1] / means[0] - 1):+.1f} %)."
    )


def _epoch(results: Mapping[str, Any]) -> str:
    epoch = results["epoch"]
    batch = results["models"][epoch["model"]]["batch"]
    found = []
    for share, most in ((epoch["waiting_share"], MOST_WAITING), (abs(epoch["growth"]), MOST_GROWTH)):
        found.append(f"less than {100 * most:g} %, {'met' if share < most else 'missed'}")
    waited = f"{100 * epoch['waiting_share']:.2f} % of the time was spent waiting for data (goal: {found[0]})"
    grown = f"memory of the process grew by {100 * epoch['growth']:+.2f} % (goal: {found[1]})"
    return (
        f"{epoch['model']} was trained for a whole epoch on these data, {epoch['steps']:,} steps in "
        f"{seconds(epoch['seconds'])}: {waited}, and {grown}, from the third to the last "
        f"quarter's minimum after a step, without free memory of the allocator. {_memory(epoch['memory_bytes'])} "
        f"Without steps, reading a batch of {batch} takes {seconds(epoch['reading_seconds'])}. Captions "
        f"take {epoch['caption_bytes']:.0f} bytes each in memory."
    )
