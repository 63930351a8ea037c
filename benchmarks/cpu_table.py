"""Render the results of `itm-fast bench` as Markdown, with the targets and the reasons for missed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.units import commit_of
from itm_fast.benchmarking.table import megabytes, table, time

__all__ = ["markdown", "summary"]

# Target ratios at the full size, by workload and variant: time and peak memory against the loop, and time against the
# best form of the same precision in plain PyTorch that takes a user about an hour to write.
TARGETS: dict[tuple[str, str], tuple[float | None, float | None, float | None]] = {
    ("scores", "native"): (7.0, None, 2.0),
    ("step", "native"): (30.0, 39.0, None),
    ("evaluation", "native"): (10.0, None, None),
    ("scores", "native high"): (16.0, None, None),
    ("step", "native high"): (57.0, 39.0, None),
    ("evaluation", "native high"): (26.0, None, None),
    ("scores", "native bf16"): (38.0, None, 7.0),
    ("step", "native bf16"): (100.0, 48.0, None),
    ("evaluation", "native bf16"): (40.0, None, None),
    ("regulated scores", "native"): (1.5, None, None),
    ("regulated step", "native"): (4.5, 50.0, None),
    ("regulated scores", "native high"): (3.0, None, None),
    ("regulated step", "native high"): (10.0, 50.0, None),
    ("regulated scores", "native bf16"): (8.0, None, None),
    ("regulated step", "native bf16"): (18.0, 50.0, None),
}
NO_TARGETS = (None, None, None)
LOWER_INPUTS = {"native high": 'float32, "high"', "native medium": 'float32, "medium"', "native bf16": "bfloat16"}
LOSS_TARGETS = {4096: 15.0, 128: 3.0}
# Notes below a table if one of these targets is missed: why it is hard to reach.
BOUND = (
    "All forms share one float32 matrix product of regions and words, which takes most of itm_fast's time and "
    "bounds the ratios of scores, steps and evaluations. Lower precisions move that bound."
)
MEMORY_BOUND = (
    "The loop's peak differs by several percent between runs of the same code on one machine, that of itm_fast by two "
    "percent: a target so close to the ratio is met in some runs and missed in others."
)
LOSS_BOUND = (
    "At B = 4096 plain PyTorch writes sixteen new matrices of 67 MB in a call over all negatives, itm_fast one: the "
    "ratio depends on how fast the system provides memory, and differs between runs on one machine. At B = 128 both "
    "are bound by the time of a few calls through autograd."
)
REGULATED_BOUND = (
    "Two products with float32 weights for every pair of a word and an image take most of the time of all forms. A "
    "step adds the backward of at most three pairs per anchor, always in float32."
)
# The targets of lower precisions need AMX; the key says whether the CPU has AVX-512 products of bfloat16.
WITHOUT_AMX = {
    True: (
        "The targets of lower precisions are set for processors with AMX, which this one lacks: its products of "
        'bfloat16 are twice as fast as those of float32, and "high" stays float32. [With AMX](#with-amx).'
    ),
    False: "This processor has no products of bfloat16: everything is computed in float32.",
}


def markdown(results: Mapping[str, Any]) -> str:
    """Render the machine, times, memory and accuracy; missed targets state the gap."""
    return _joined(_sections(results).values())


def of_amx(results: Mapping[str, Any]) -> str:
    """Render what AMX changes: scores, steps and evaluations of both models, and accuracy."""
    return _joined(part for name, part in _sections(results).items() if name not in ("query", "losses", "boosting"))


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _sections(results: Mapping[str, Any]) -> dict[str, str]:
    """Render all sections in their order; those of an old result may be missing."""
    measured, preset = results["workloads"], results["preset"]
    sections = {
        "where": _where(results["environment"]),
        "scores": _scores(measured, preset),
        "low precision": _low_precision(measured, preset, results["environment"]["instruction_set"]),
    }
    if "query" in measured:
        sections["query"] = _query(measured["query"])
    sections["accuracy"] = _accuracy(measured["scores"]["variants"])
    if "regulated scores" in measured:
        sections["RCAR"] = _regulated(measured, preset)
        sections["accuracy of RCAR"] = _accuracy(measured["regulated scores"]["variants"], "RCAR scores")
    return sections | {"losses": _losses(measured), "boosting": _boosting(measured)}


def summary(results: Mapping[str, Any]) -> str:
    """Render five figures in float32 with their accuracy, for the README and the start page."""
    measured, preset = results["workloads"], results["preset"]
    environment = results["environment"]
    rows = [["float32", "authors' loop", "itm_fast", "speedup", "peak memory"]]
    size = f"{preset['batch']} x {preset['batch']}"
    names = {key: name for key, name in _names(preset).items() if key != "step all"}
    names["regulated scores"] = f"RCAR scores, {size}, no gradient"
    names["regulated step"] = f"RCAR hardest-negative step, {size}"
    for key, name in names.items():
        variants = measured[key]["variants"]
        loop, native = variants["loop"], variants["native"]
        medians = [time(variant).partition(" [")[0] for variant in (loop, native)]
        saved = "not measured"
        if loop.get("peak_bytes") and native.get("peak_bytes"):
            saved = f"1/{loop['peak_bytes'] / native['peak_bytes']:.0f} of the loop's"
        rows.append([name, *medians, f"**{loop['median_s'] / native['median_s']:.1f}x**", saved])
    accuracies = [measured[key]["variants"]["native"]["accuracy"] for key in ("scores", "regulated scores")]
    error, changed = (
        max(figures[name] for figures in accuracies) for name in ("max_score_error", "changed_hardest_negatives")
    )
    gains = {key: _over_packed(measured[key]["variants"]) for key in _names(preset)}
    least, (low, *_, high) = gains.pop("step all"), sorted(gains.values())
    others = f"differ in {100 * changed:.2g} % of the anchors" if changed else "are the same"
    return (
        f"{table(rows)}\n\n{environment['processor']}, {environment['threads']} threads, "
        f"torch {environment['torch']}; medians. Scores differ from float64 by at most {error:.1e}; the hardest "
        f"negatives {others}. Over packed PyTorch (no padding; eager or under `torch.compile`, whichever is faster) "
        f"the speedup of SCAN's rows is {low:.1f}x to {high:.1f}x, and {least:.1f}x for a step with all negatives.\n"
    )


def _over_packed(variants: Mapping[str, Any]) -> float:
    """Return how many times as fast as the fastest packed form itm_fast is."""
    packed = [
        variants[name]["median_s"] for name in ("packed", "packed bounded", "packed compiled") if name in variants
    ]
    ratio: float = min(packed) / variants["native"]["median_s"]
    return ratio


def _where(environment: Mapping[str, Any]) -> str:
    commit = commit_of(environment, "an installed package")
    return (
        f"Measured on {environment['date'][:10]} with `{environment['command']}` at {commit}: "
        f"{environment['processor']}, {environment['threads']} threads, {environment['instruction_set']}, "
        f"torch {environment['torch']}, float32. Medians of interleaved runs, smallest and largest in brackets; "
        "peak memory above the inputs, each in a separate process."
    )


def _names(preset: Mapping[str, Any]) -> dict[str, str]:
    size = f"{preset['batch']} x {preset['batch']}"
    gallery = f"{preset['evaluation_images']} x {preset['evaluation_captions']}"
    return {
        "scores": f"SCAN t2i scores, {size}, no gradient",
        "step": f"SCAN t2i hardest-negative step, {size}",
        "step all": f'SCAN t2i step with "all" negatives, {size}',
        "evaluation": f"SCAN t2i evaluation, {gallery}, with ranks",
    }


def _targets(preset: Mapping[str, Any], key: str, variant: str) -> tuple[float | None, float | None, float | None]:
    full = preset["batch"] == 128 and preset["dim"] == 1024
    return TARGETS.get((key, variant), NO_TARGETS) if full else NO_TARGETS


def _scores(measured: Mapping[str, Any], preset: Mapping[str, Any]) -> str:
    header = ["workload", "per-caption loop", "packed PyTorch", "packed, compiled", "itm_fast"]
    rows = [[*header, "against the loop", "target", "against the best packed form", "target"]]
    memory = [["peak memory", *header[1:], "against the loop", "target"]]
    for key, name in _names(preset).items():
        variants = measured[key]["variants"]
        loop, native = variants["loop"], variants["native"]
        packed = variants.get("packed", variants.get("packed bounded"))
        compared = [loop, packed, variants.get("packed compiled"), native]
        ratio = loop["median_s"] / native["median_s"]
        best = _over_packed(variants)
        target, memory_target, packed_target = _targets(preset, key, "native")
        times = [time(variant) for variant in compared]
        rows.append(
            [name, *times, f"**{ratio:.1f}x**", _target(ratio, target), f"{best:.1f}x", _target(best, packed_target)]
        )
        if loop.get("peak_bytes") and native.get("peak_bytes"):
            saved = loop["peak_bytes"] / native["peak_bytes"]
            sizes = [megabytes(variant) for variant in compared]
            memory.append([name, *sizes, f"**1/{saved:.0f}**", _target(saved, memory_target, "1/")])
    times_of_all = table(rows) + _reason(rows, BOUND)
    return f"{times_of_all}\n\n{table(memory)}{_reason(memory, MEMORY_BOUND)}" if len(memory) > 1 else times_of_all


def _low_precision(measured: Mapping[str, Any], preset: Mapping[str, Any], instruction_set: str) -> str:
    header = ["lower precisions", "inputs", "itm_fast", "against the loop in float32", "target"]
    rows = [[*header, "against packed PyTorch in bfloat16", "target", "peak memory", "against the loop", "target"]]
    for key, name in _names(preset).items():
        variants = measured[key]["variants"]
        for variant, label in LOWER_INPUTS.items():
            if variant not in variants:
                continue
            loop, packed, native = variants["loop"], variants.get("packed bf16"), variants[variant]
            target, memory_target, packed_target = _targets(preset, key, variant)
            ratio = loop["median_s"] / native["median_s"]
            row = [name, label, time(native), f"**{ratio:.1f}x**", _target(ratio, target)]
            if packed:
                best = packed["median_s"] / native["median_s"]
                row += [f"{best:.1f}x of {time(packed)}", _target(best, packed_target)]
            else:
                row += ["not run", ""]
            if loop.get("peak_bytes") and native.get("peak_bytes"):
                saved = loop["peak_bytes"] / native["peak_bytes"]
                row += [megabytes(native), f"**1/{saved:.0f}**", _target(saved, memory_target, "1/")]
            else:
                row += ["not run", "", ""]
            rows.append(row)
    rendered = table(rows)
    if instruction_set == "amx":
        return rendered + _reason(rows, _with_amx(measured["scores"]["variants"]))
    return f"{rendered}\n\n{WITHOUT_AMX[instruction_set == 'avx512_bf16']}"


def _with_amx(variants: Mapping[str, Any]) -> str:
    seconds = {name: variants[name]["median_s"] for name in ("native", "native bf16", "packed", "packed bf16")}
    return (
        "The targets of lower precisions were set on a machine whose products of bfloat16 are ten times as fast as "
        "those of float32. On this one bfloat16 makes the scores of itm_fast "
        f"{seconds['native'] / seconds['native bf16']:.1f} times as fast, and those of packed PyTorch "
        f"{seconds['packed'] / seconds['packed bf16']:.1f} times."
    )


def _regulated(measured: Mapping[str, Any], preset: Mapping[str, Any]) -> str:
    header = ["RCAR t2i, 2 RAR and 1 RCR", "inputs", "per-pair loop", "packed PyTorch", "itm_fast", "against the loop"]
    rows = [[*header, "target", "against packed PyTorch", "peak memory", "of the loop", "target"]]
    size = f"{preset['batch']} x {preset['batch']}"
    inputs = {"native": "float32", **LOWER_INPUTS}
    for key, name in (
        ("regulated scores", f"scores, {size}, no gradient"),
        ("regulated step", f"hardest-negative step, {size}"),
    ):
        variants = measured[key]["variants"]
        loop = variants["loop"]
        for variant, label in inputs.items():
            if variant not in variants:
                continue
            native, packed = variants[variant], variants["packed bf16" if variant == "native bf16" else "packed"]
            target, memory_target, _ = _targets(preset, key, variant)
            ratio = loop["median_s"] / native["median_s"]
            row = [name, label, time(loop), time(packed), time(native), f"**{ratio:.1f}x**", _target(ratio, target)]
            row += [f"{packed['median_s'] / native['median_s']:.1f}x", megabytes(native)]
            if loop.get("peak_bytes") and native.get("peak_bytes"):
                saved = loop["peak_bytes"] / native["peak_bytes"]
                row += [f"**1/{saved:.0f}** of {megabytes(loop)}", _target(saved, memory_target, "1/")]
            else:
                row += ["not run", ""]
            rows.append(row)
    return table(rows) + _reason(rows, REGULATED_BOUND)


def _query(workload: Mapping[str, Any]) -> str:
    images, variants = workload["arguments"][0]["images"], workload["variants"]
    head = [f"one caption of 12 words against {images:,} images, SCAN t2i", "inputs", "time", "against plain PyTorch"]
    rows = [[*head, "largest error against float64"]]
    labels = {"plain": "plain PyTorch, Gram matrices kept", "native": "itm_fast", "prepared": "itm_fast, prepared"}
    for name, variant in variants.items():
        form, _, low = name.partition(" ")
        ratio = variants["plain"]["median_s"] / variant["median_s"]
        error = f"{variant['accuracy']['max_score_error']:.1e}"
        rows.append([labels[form], "bfloat16" if low else "float32", time(variant), f"**{ratio:.1f}x**", error])
    return table(rows)


def _accuracy(variants: Mapping[str, Any], what: str = "those scores") -> str:
    rows = [[f"accuracy of {what} against float64", "largest error", "hardest negatives that change"]]
    labels = {
        "loop": "per-caption loop",
        "packed": "packed PyTorch",
        "packed bf16": "packed PyTorch, bfloat16 inputs",
        "native": "itm_fast",
        "native high": 'itm_fast, "high"',
        "native medium": 'itm_fast, "medium"',
        "native bf16": "itm_fast, bfloat16 inputs",
    }
    for name, label in labels.items():
        if name not in variants:
            continue
        figures = variants[name]["accuracy"]
        rows.append([label, f"{figures['max_score_error']:.1e}", f"{100 * figures['changed_hardest_negatives']:.2f} %"])
    return table(rows)


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
            [name, time(plain), time(native), f"**{ratio:.1f}x**", _target(ratio, LOSS_TARGETS.get(int(batch)))]
        )
    return table(rows) + _reason(rows, LOSS_BOUND)


def _boosting(measured: Mapping[str, Any]) -> str:
    head = ["absolute boosting loss, value and gradient through autograd", "plain PyTorch", "itm_fast", "ratio"]
    rows = [[*head, "error of the loss, plain PyTorch", "itm_fast"]]
    for key, workload in measured.items():
        if not key.startswith("boosting "):
            continue
        _, mining, batch = key.split()
        plain, native = workload["variants"]["plain"], workload["variants"]["native"]
        errors = [f"{variant['accuracy']['relative_loss_error']:.1e}" for variant in (plain, native)]
        ratio = plain["median_s"] / native["median_s"]
        rows.append([f'"{mining}", B = {batch}', time(plain), time(native), f"**{ratio:.1f}x**", *errors])
    return table(rows) if len(rows) > 1 else ""


def _reason(rows: list[list[str]], reason: str) -> str:
    """Render the note below a table on why a target is missed; empty if none is."""
    return f"\n\n{reason}" if any("reached" in cell for row in rows[1:] for cell in row) else ""


def _target(reached: float, target: float | None, prefix: str = "") -> str:
    if target is None:
        return ""
    text = f"{prefix}{target:g}{'' if prefix else 'x'}"
    return f"{text}, met" if reached >= target else f"{text}, reached {int(100 * reached / target)} % of it"
