"""Measure training steps of LAPS with its encoders, and count the memory of those that do not fit.

`python -m benchmarks.laps --encoders` runs it.

Inside: `run`, `markdown`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks import laps
from benchmarks.laps_encoders import (
    BOTH,
    LOOP,
    VARIANTS,
    Sizes,
    bytes_of,
    counted,
    make_inputs,
    make_model,
    make_step,
    step_of,
)
from benchmarks.machine import kept_bytes, processor_time
from benchmarks.units import changes_of
from itm_fast.benchmarking.measure import interleave, peak_memory, reset_peak, status_bytes
from itm_fast.benchmarking.table import megabytes, table
from itm_fast.benchmarking.table import time as described_time
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["markdown", "run"]


def run(
    small_batch: int,
    batches: Sequence[int],
    *,
    measured: Sequence[int],
    rounds: int,
    threads: int,
    micro_batches: tuple[int, int] = (2, 8),
    sizes: Sizes | None = None,
    most_bytes: float = math.inf,
    before: Mapping[str, Any] | None = None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare all variants in a batch that fits, and count the memory of larger batches.

    Args:
        small_batch: pairs of the steps that all variants take.
        batches: larger numbers of pairs.
        measured: those in which variants take a step: the last one, and those whose counted memory is below
            `most_bytes`.
        micro_batches: pairs that are encoded at a time, in the small batch and in the others.
        before: results of an interrupted call. What they contain is not measured again.
        save: called with the results after each part.
    """
    sizes = sizes or Sizes()
    torch.set_num_threads(threads)
    where = environment(threads, build_info())
    results = dict(before) if before else {"format_version": laps.FORMAT_VERSION, "environment": where, "commits": []}
    load, commit = os.getloadavg()[0], where["commit"]
    results["loads"] = [*results.get("loads", []), load]
    if commit not in results["commits"]:
        results["commits"].append(commit)
    changed = results["environment"]["uncommitted_changes"] or where["uncommitted_changes"]
    results["environment"] = results["environment"] | {"uncommitted_changes": changed, "command": where["command"]}
    model = make_model(sizes)
    results |= {"sizes": attrs.asdict(sizes), "weight_bytes": bytes_of(model)}
    if "small" not in results:
        variants = _compare(model, sizes, small_batch, micro_batches[0], rounds, progress)
        results["small"] = {"batch": small_batch, "micro_batch": micro_batches[0], "rounds": rounds} | {
            "variants": variants
        }
        save(results)
    large = {case["batch"]: case for case in results.get("large", [])}
    for batch in batches:
        if batch not in large:
            progress(f"batches of {batch}: counts")
            found = _counts(model, sizes, batch, micro_batches[1], threads)
            large[batch] = {"batch": batch, "micro_batch": micro_batches[1], "variants": found}
            save(results | {"large": list(large.values())})
    results["large"] = list(large.values())
    _add_memory(model, sizes, results, threads, progress, save)
    for batch in measured:
        # What needs most memory comes last.
        for name, (form, parts) in reversed(VARIANTS.items()):
            found = large[batch]["variants"][name]
            if "seconds" not in found and (name == BOTH or found["counted_bytes"] < most_bytes):
                progress(f"batches of {batch}: {name}")
                found |= _measured_step(model, make_inputs(sizes, batch), form, micro_batches[1] if parts else None)
                save(results)
    results["loads"].append(os.getloadavg()[0])
    return results


def _compare(
    model: Any, sizes: Sizes, batch: int, micro: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure time and agreement of all variants."""
    inputs = make_inputs(sizes, batch)
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    differences: dict[str, tuple[float, float]] = {LOOP: (0.0, 0.0)}
    exact: dict[str, Any] = {}

    def take(name: str) -> float:
        form, parts = VARIANTS[name]
        wall, start = time.monotonic(), time.process_time()
        scores = step_of(model, inputs, form, micro if parts else None)
        seconds = time.process_time() - start
        walls[name].append(time.monotonic() - wall)
        if name == LOOP:
            # All steps have the same weights.
            exact.update(scores=scores, gradients=[one.grad for one in model.parameters()])
        elif name not in differences:
            differences[name] = float((scores - exact["scores"]).abs().max()), _difference(model, exact["gradients"])
        return seconds

    timings = interleave(
        {name: partial(take, name) for name in VARIANTS},
        dict.fromkeys(VARIANTS, rounds),
        lambda call: call(),
        lambda name: progress(f"batches of {batch}: {name}"),
    )
    model.zero_grad(set_to_none=True)
    return {
        name: {
            **timing.as_dict(),
            "wall_s": walls[name][-rounds:],
            "largest_score_difference": differences[name][0],
            "gradient_difference": differences[name][1],
        }
        for name, timing in timings.items()
    }


def _add_memory(
    model: Any,
    sizes: Sizes,
    results: dict[str, Any],
    threads: int,
    progress: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Add measured and counted memory to the variants of the small batch."""
    small = results["small"]
    batch, micro = small["batch"], small["micro_batch"]
    sparse = None
    for name, (form, parts) in VARIANTS.items():
        found = small["variants"][name]
        if "counted_bytes" not in found:
            sparse = sparse or peak_memory(laps.make_step, "itm_fast", batch, threads=threads)
            found["counted_bytes"], found["how"] = counted(model, sizes, batch, micro, sparse, name)
        if "peak_bytes" not in found:
            progress(f"batches of {batch}: memory of {name}")
            found["peak_bytes"] = peak_memory(make_step, form, sizes, batch, micro if parts else None, threads=threads)
            save(results)


def _difference(model: Any, exact: Sequence[Tensor]) -> float:
    """Return the norm of the difference of all gradients from the exact ones, as a share of their norm."""
    pairs = [(one.grad, other) for one, other in zip(model.parameters(), exact, strict=True)]
    differing = sum(float((one - other).double().square().sum()) for one, other in pairs)
    return math.sqrt(differing / sum(float(one.double().square().sum()) for one in exact))


def _counts(model: Any, sizes: Sizes, batch: int, micro: int, threads: int) -> dict[str, Any]:
    """Count the memory of all variants."""
    sparse = peak_memory(laps.make_step, "itm_fast", batch, threads=threads)
    found = {}
    for name in VARIANTS:
        count, how = counted(model, sizes, batch, micro, sparse, name)
        found[name] = {"counted_bytes": count, "how": how}
    return found


def _measured_step(model: Any, inputs: tuple[Tensor, Tensor, Tensor], form: str, micro: int | None) -> dict[str, Any]:
    """Measure memory and time of one step of a variant."""
    kept_bytes()  # Returns free memory, so that it does not hide the use of more.
    reset_peak()
    before, start = status_bytes("VmRSS"), time.monotonic()
    seconds = processor_time(lambda: step_of(model, inputs, form, micro))
    found = {"peak_bytes": status_bytes("VmHWM") - before, "seconds": seconds, "wall_s": time.monotonic() - start}
    model.zero_grad(set_to_none=True)
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Render one table of the small batch and one of the larger ones."""
    small, where, sizes = results["small"], results["environment"], results["sizes"]
    loop = small["variants"][LOOP]
    rows = [
        ["variant", "step, CPU seconds", "of the loop", "wall time", "memory, measured", "memory, counted",
         "difference of scores", "of gradients"]
    ]  # fmt: skip
    for name, found in small["variants"].items():
        rows.append(
            [
                name,
                described_time(found),
                f"{found['median_s'] / loop['median_s']:.2f}",
                f"{sorted(found['wall_s'])[len(found['wall_s']) // 2]:.0f} s",
                megabytes(found),
                _counted(found),
                f"{found['largest_score_difference']:.1e}",
                f"{found['gradient_difference']:.1e}",
            ]
        )
    larger = [
        [
            "batch",
            "variant",
            "memory, counted",
            "of the loop",
            "how",
            "memory, measured",
            "step, CPU seconds",
            "wall time",
        ]
    ]
    for case in results["large"]:
        base = case["variants"][LOOP]["counted_bytes"]
        for name, found in case["variants"].items():
            measured = "peak_bytes" in found
            size = found["counted_bytes"]
            larger.append(
                [
                    str(case["batch"]),
                    name,
                    _counted(found),
                    f"{size / base:.2f}",
                    found["how"],
                    megabytes(found) if measured else "not run",
                    f"{found['seconds']:.0f} s, one step" if measured else "not run",
                    f"{found['wall_s']:.0f} s" if measured else "",
                ]
            )
    weights = results["weight_bytes"]
    known = [one for one in small["variants"].values() if one.get("peak_bytes") and "counted_bytes" in one]
    shares = [one["counted_bytes"] / one["peak_bytes"] for one in known]
    agreement = f"; in the small batch {min(shares):.0%} to {max(shares):.0%} of the measured peaks" if shares else ""
    return (
        f"Batches of {small['batch']}, micro-batches of {small['micro_batch']}: everything is measured, and memory is "
        f"counted, too.\n\n{table(rows)}\n\nLarger batches, micro-batches of {results['large'][0]['micro_batch']}:\n\n"
        f"{table(larger)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at "
        f"{', '.join(str(commit)[:12] for commit in results['commits'])}{changes_of(where)}: "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, float32, random weights. ViT: "
        f"{sizes['side']} pixels, patches of {sizes['patch']}, width {sizes['width']}, {sizes['layers']} layers; BERT "
        f"of the same width and depth, captions of {laps.WORDS.start} to {laps.WORDS.stop - 1} tokens; joint width "
        f"{sizes['dim']}. Times are processor time, medians of {small['rounds']} interleaved steps with smallest and "
        f"largest in brackets, without the optimiser; wall times show the other load of the machine "
        f"({min(results['loads']):.1f} to {max(results['loads']):.1f}). Memory is above the weights "
        f"({weights / 1e6:,.0f} MB; AdamW adds {2 * weights / 1e6:,.0f} MB) and the inputs. Counted memory is what "
        f"graph and gradients keep at the fullest moment, each storage once, without intermediate results"
        f"{agreement}.\n"
    )


def _counted(found: Mapping[str, Any]) -> str:
    return f"{found['counted_bytes'] / 1e6:,.0f} MB" if "counted_bytes" in found else "not run"
