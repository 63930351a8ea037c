"""Render the costs of FDF and ADDR as Markdown, using only their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.scenarios import percent
from benchmarks.units import commit_of
from itm_fast.benchmarking.table import megabytes, table

__all__ = ["markdown"]

# Captions per image in the common test sets.
_CAPTIONS = 5
# Note below the table if the limit is missed: why.
BOUND = (
    "We do not know where the paper's own code spends its time. Here matrix products are nearly all of the time, "
    "and a conversion multiplies every region by {per_conversion:.1f} million weights: the features of pairs take "
    "{more} multiply-adds, however they are computed, and a step takes them about three times for its own batch and "
    "once or more for the one before. The paper encodes an image again for each of its captions; evaluation here does "
    "so once, the column of a split."
)


def markdown(results: Mapping[str, Any]) -> str:
    """Render a table for each host of FDF, one for those of ADDR, and the machine."""
    published = results["published"]
    # The host with the limit comes first.
    names = sorted(results["fdf"], key=lambda name: name != published["host"])
    parts = [_fdf(name, results["fdf"][name], published) for name in names]
    return "\n\n".join([*parts, _addr(results["addr"]), _where(results)]) + "\n"


def _fdf(name: str, host: Mapping[str, Any], published: Mapping[str, Any]) -> str:
    rows, bars = host["rows"], name == published["host"]
    alone, setup = rows["0"], host["setup"]
    header = ["N", "a step", "features of pairs", "their multiply-adds", "features of a split"]
    lines = [[*header, "error of a step's loss", "of its gradient", "runs"]]
    if bars:
        lines[0][2:2], lines[0][4:4] = ["the paper"], ["the paper"]
    missed = False
    for count in sorted(rows, key=int):
        row = rows[count]
        times = _times(row)
        if count == "0":
            cells = [_spread_seconds(row["step"]), _seconds(times["pairs"]), f"{_products(row) / 1e9:.2f} G a pair", ""]
        else:
            ratios = {what: seconds / _times(alone)[what] for what, seconds in times.items()}
            cells = [_spread_percent(row["step"], alone["step"]), percent(ratios["pairs"])]
            cells += [percent(_products(row) / _products(alone)), percent(ratios["split"])]
        if bars:
            theirs = ["", ""]
            if count == str(published["conversions"]):
                theirs = [_bar(ratios["step"], published["step"]), _bar(ratios["pairs"], published["features"])]
                missed = any("missed" in bar for bar in theirs)
            cells[1:1], cells[3:3] = [theirs[0]], [theirs[1]]
        lines.append(["host alone" if count == "0" else count, *cells, *_errors(row), str(len(row["step"]["runs_s"]))])
    text = f"FDF on {name}, batches of {setup['batch']}, width {setup['dim']}, recipe `{host['recipe']}`:\n\n"
    below = [_bound(rows, published)] if missed else []
    return "\n\n".join([text + table(lines), *below, _again(host)])


def _again(host: Mapping[str, Any]) -> str:
    """Render the cost of encoding the other batches again: time, memory and errors of a step, if measured."""
    alone, kept = host["rows"]["0"], "Steps in the table above are those with `--other-batches kept`."
    if not host["again"]:
        return kept
    ((count, again),) = host["again"].items()
    rows = {"host alone": alone, "kept": host["rows"][count], **again}
    seconds = {name: row["step"]["median_s"] for name, row in rows.items()}
    header = [f"N = {count}", "a step", "compared with the host", "peak memory", "compared with the host"]
    lines = [[*header, "error of a step's loss", "of its gradient"]]
    for name, row in rows.items():
        beside = ["", ""]
        if row is not alone:
            beside = [_spread_percent(row["step"], alone["step"]), _room(row, alone)]
        shown = name if row is alone else f"`{name}`"
        lines.append([shown, _spread_seconds(row["step"]), beside[0], megabytes(row), beside[1], *_errors(row)])
    return (
        f"{kept} `fresh` encodes N - 1 more batches, without gradient; with `trained`, the default, "
        f"their gradients reach the extractors, too:\n\n{table(lines)}\n\n"
        f"`fresh` adds {_seconds(seconds['fresh'] - seconds['kept'])} here, `trained` "
        f"{_seconds(seconds['trained'] - seconds['kept'])}; the host alone encodes a batch of captions without "
        f"gradient in {_seconds(alone['captions']['median_s'])}. Memory is that of a process with the model, its "
        "optimiser, its queue and three batches, in one run."
    )


def _spread_seconds(timing: Mapping[str, Any]) -> str:
    """Render the median, with minimum and maximum if there are several runs."""
    runs = timing["runs_s"]
    median = _seconds(timing["median_s"])
    return f"{median} ({min(runs):.3g} to {max(runs):.3g})" if len(runs) > 1 else median


def _spread_percent(timing: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    """Render the increase of the median; with as many runs as the host, also its range over the rounds."""
    text = percent(timing["median_s"] / alone["median_s"])
    ratios = [mine / host for mine, host in zip(timing["runs_s"], alone["runs_s"], strict=False)]
    if len(timing["runs_s"]) != len(alone["runs_s"]) or len(ratios) == 1:
        return text
    return f"{text} ({percent(min(ratios))} to {percent(max(ratios))})"


def _room(row: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    return percent(row["peak_bytes"] / alone["peak_bytes"]) if row["peak_bytes"] and alone["peak_bytes"] else ""


def _errors(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['accuracy'][name]:.1e}" for name in ("loss_error", "gradient_error")]


def _times(row: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds of a step, of a batch of pairs' features, and of those captions with a fifth of the images."""
    images, captions = row["images"]["median_s"], row["captions"]["median_s"]
    return {"step": row["step"]["median_s"], "pairs": images + captions, "split": images / _CAPTIONS + captions}


def _products(row: Mapping[str, Any]) -> int:
    return int(sum(row["multiply_adds"].values()))


def _bar(ratio: float, bar: float) -> str:
    found = 100 * (ratio - 1)
    return f"+{bar:g} %, met" if found <= bar else f"+{bar:g} %, missed by {round(found) - bar:.0f} points"


def _bound(rows: Mapping[str, Any], published: Mapping[str, Any]) -> str:
    row = rows[str(published["conversions"])]
    return BOUND.format(per_conversion=row["weights"] / 1e6, more=percent(_products(row) / _products(rows["0"])))


def _addr(hosts: Mapping[str, Any]) -> str:
    lines = [
        [
            "ADDR on", "a step of the host", "base", "a step of the model", "one of the discriminators",
            "a step of both", "error of the risks", "of their gradient",
        ]
    ]  # fmt: skip
    for name, host in hosts.items():
        seconds = {what: timing["median_s"] for what, timing in host["rows"].items()}
        plain, setup = seconds["plain"], host["setup"]
        lines.append(
            [
                f"{name}, batches of {setup['batch']}, width {setup['dim']}",
                _seconds(plain),
                percent(seconds["base"] / plain),
                percent(seconds["model"] / plain),
                f"{seconds['discriminators'] / plain:.2f} of the host's",
                percent((seconds["model"] + seconds["discriminators"]) / plain),
                *_errors(host),
            ]
        )
    return table(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _where(results: Mapping[str, Any]) -> str:
    where = results["environment"]
    before, after = where["load"]
    turns = min(len(timing["runs_s"]) for host in results["addr"].values() for timing in host["rows"].values())
    return (
        "Processor time, one thread; medians of interleaved runs, in brackets the range, for percentages "
        f"over single rounds; rows with one run come after the others of their host; runs for ADDR: {turns}. "
        f"The machine's load was {before:.1f} at the start and {after:.1f} at the end. Errors are relative, of float32 "
        f"against float64. {where['processor']}, {where['date'][:10]}, commit {commit_of(where)}; "
        f"made by `{where['command']}`."
    )
