"""Tables of benchmark results, in Markdown, from the JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["markdown"]

# Ratios that the project wants to reach at the full size, by workload: time and peak memory against the loop, and time
# against the best form that a user could write in an hour.
TARGETS = {"scores": (7.0, None, 2.0), "step": (30.0, 39.0, None), "evaluation": (10.0, None, None)}
LOSS_TARGETS = {4096: 15.0, 128: 3.0}
# Why a target that is missed is hard to reach, said below the table where one of these is missed.
BOUND = (
    "All forms share one float32 matrix product of regions and words, which takes most of itm_fast's time: it bounds "
    "the ratios of scores, steps and evaluations, whatever happens around it. Lower precisions move that bound."
)


def markdown(results: Mapping[str, Any]) -> str:
    """Where it was measured, times, memory and accuracy; what falls short of its target says by how much."""
    measured, preset = results["workloads"], results["preset"]
    parts = [_where(results["environment"]), _scores(measured, preset)]
    if "scores" in measured:
        parts.append(_accuracy(measured["scores"]["variants"]))
    parts.append(_losses(measured))
    return "\n\n".join(parts) + "\n"


def _where(environment: Mapping[str, Any]) -> str:
    commit = (environment["commit"] or "an installed package")[:12]
    changed = ", with uncommitted changes" if environment["uncommitted_changes"] else ""
    return (
        f"Measured on {environment['date'][:10]} with `{environment['command']}` at {commit}{changed}: "
        f"{environment['processor']}, {environment['threads']} threads, {environment['instruction_set']}, "
        f"torch {environment['torch']}, float32. Medians of interleaved runs, smallest and largest in brackets; "
        "peak memory above the inputs, each in a process of its own."
    )


def _scores(measured: Mapping[str, Any], preset: Mapping[str, Any]) -> str:
    size = f"{preset['batch']} x {preset['batch']}"
    gallery = f"{preset['evaluation_images']} x {preset['evaluation_captions']}"
    full = preset["batch"] == 128 and preset["dim"] == 1024
    names = {
        "scores": f"SCAN t2i scores, {size}, no gradient",
        "step": f"SCAN t2i hardest-negative step, {size}",
        "evaluation": f"SCAN t2i evaluation, {gallery}, with ranks",
    }
    header = ["workload", "per-caption loop", "packed PyTorch", "packed, compiled", "itm_fast"]
    rows = [[*header, "against the loop", "target", "against the best packed form", "target"]]
    memory = [["peak memory", *header[1:], "against the loop", "target"]]
    for key, name in names.items():
        variants = measured[key]["variants"]
        loop, native = variants["loop"], variants["native"]
        packed = variants.get("packed", variants.get("packed bounded"))
        compared = [loop, packed, variants.get("packed compiled"), native]
        ratio = loop["median_s"] / native["median_s"]
        best = min(form["median_s"] for form in compared[1:3] if form) / native["median_s"]
        target, memory_target, packed_target = TARGETS[key] if full else (None, None, None)
        times = [_time(variant) for variant in compared]
        rows.append(
            [name, *times, f"**{ratio:.1f}x**", _target(ratio, target), f"{best:.1f}x", _target(best, packed_target)]
        )
        if loop.get("peak_bytes") and native.get("peak_bytes"):
            saved = loop["peak_bytes"] / native["peak_bytes"]
            sizes = [_megabytes(variant) for variant in compared]
            memory.append([name, *sizes, f"**1/{saved:.0f}**", _target(saved, memory_target, "1/")])
    reason = f"\n\n{BOUND}" if any("reached" in cell for row in rows[1:] for cell in row) else ""
    return _table(rows) + reason + ("\n\n" + _table(memory) if len(memory) > 1 else "")


def _accuracy(variants: Mapping[str, Any]) -> str:
    rows = [["accuracy of those scores against float64", "largest error", "hardest negatives that change"]]
    labels = {"loop": "per-caption loop", "packed": "packed PyTorch", "native": "itm_fast"}
    for name, label in labels.items():
        figures = variants[name]["accuracy"]
        rows.append([label, f"{figures['max_score_error']:.1e}", f"{100 * figures['changed_hardest_negatives']:.2f} %"])
    return _table(rows)


def _losses(measured: Mapping[str, Any]) -> str:
    rows = [["triplet loss, value and gradient through autograd", "plain PyTorch", "itm_fast", "ratio", "target"]]
    for key, workload in measured.items():
        if not key.startswith("loss "):
            continue
        _, mining, batch = key.split()
        plain, native = workload["variants"]["plain"], workload["variants"]["native"]
        ratio = plain["median_s"] / native["median_s"]
        name = f'"{mining}", B = {batch}'
        rows.append(
            [name, _time(plain), _time(native), f"**{ratio:.1f}x**", _target(ratio, LOSS_TARGETS.get(int(batch)))]
        )
    return _table(rows)


def _target(reached: float, target: float | None, prefix: str = "") -> str:
    if target is None:
        return ""
    text = f"{prefix}{target:g}{'' if prefix else 'x'}"
    return f"{text}, met" if reached >= target else f"{text}, reached {100 * reached / target:.0f} % of it"


def _time(variant: Mapping[str, Any] | None) -> str:
    if variant is None:
        return "not run"
    median, low, high = (variant[key] for key in ("median_s", "min_s", "max_s"))
    unit, scale = ("s", 1.0) if median >= 1.0 else ("ms", 1e3)
    spread = f" [{low * scale:.3g}, {high * scale:.3g}]" if len(variant["runs_s"]) > 1 else ""
    return f"{median * scale:.3g} {unit}{spread}"


def _megabytes(variant: Mapping[str, Any] | None) -> str:
    return f"{variant['peak_bytes'] / 1e6:,.0f} MB" if variant and variant.get("peak_bytes") else "not run"


def _table(rows: list[list[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
