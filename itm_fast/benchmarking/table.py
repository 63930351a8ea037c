"""Render the results of a benchmark as a Markdown table.

Inside: `markdown` for all workloads, and `table`, `time` and `megabytes`, of which other tables are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["markdown", "megabytes", "table", "time"]


def markdown(results: Mapping[str, Any]) -> str:
    """Render one line per variant of each workload, from the content of the JSON file.

    Each line has the time, the speed relative to the slowest plain form (the per-caption loop, or plain PyTorch for
    losses), the peak memory and the largest error against float64.
    """
    environment = results["environment"]
    rows = [["workload", "variant", "time", "speed", "peak memory", "largest error"]]
    for workload, found in results["workloads"].items():
        variants = found["variants"]
        base = variants.get("loop") or variants.get("plain")
        for name, figures in variants.items():
            accuracy = figures.get("accuracy", {})
            error = accuracy.get("max_score_error", accuracy.get("relative_loss_error"))
            rows.append(
                [
                    workload,
                    name.replace("native", "itm_fast"),
                    time(figures),
                    f"{base['median_s'] / figures['median_s']:.1f}x" if base else "",
                    megabytes(figures) if "peak_bytes" in figures else "",
                    "" if error is None else f"{error:.1e}",
                ]
            )
    where = (
        f"{environment.get('device') or environment['processor']}, {environment['threads']} threads, "
        f"{environment['instruction_set']}, torch {environment['torch']}. Times are medians of interleaved runs with "
        "the smallest and the largest in brackets."
    )
    return f"{where}\n\n{table(rows)}\n"


def time(variant: Mapping[str, Any] | None) -> str:
    """Format the median time, with minimum and maximum in brackets."""
    if variant is None:
        return "not run"
    median, low, high = (variant[key] for key in ("median_s", "min_s", "max_s"))
    unit, scale = ("s", 1.0) if median >= 1.0 else ("ms", 1e3)
    shown, least, most = (_number(value * scale) for value in (median, low, high))
    return f"{shown} {unit}{f' [{least}, {most}]' if len(variant['runs_s']) > 1 else ''}"


def _number(value: float) -> str:
    """Format with three digits, and without an exponent from 1,000 on."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def megabytes(variant: Mapping[str, Any] | None) -> str:
    """Format the peak memory."""
    return f"{variant['peak_bytes'] / 1e6:,.0f} MB" if variant and variant.get("peak_bytes") else "not run"


def table(rows: list[list[str]]) -> str:
    """Format rows of cells as a table. The first row is the header; align all columns except the first to the right."""
    header, *body = rows
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
