"""Tables of the results of benchmarks/experiments/__main__.py, as Markdown.

Inside: `table`, `experiments_of`, `rendered`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.ensembles import ensemble_result
from benchmarks.experiments.figures import figures_there
from benchmarks.experiments.files import Experiment, shown_path
from benchmarks.experiments.results import result_of
from benchmarks.experiments.verdicts import verdicts

__all__ = ["experiments_of", "rendered", "table"]

_NOT_RUN, _DIVERGED = "not run", "diverged"


def table(experiment: Experiment, results: Path) -> str:
    """Render the results as Markdown: sums of recalls, mean and spread of each row, and whether equal rows agree.

    Mean, spread (the standard deviation over the seeds) and MD (the mean of the seeds' mean distances) of a row appear
    once all of its runs are done, and none diverged. Seconds are the median over finished runs. Ensembles follow, a
    single one with its seeds in the column of the spread, then figures.

    Raises:
        ValueError: as `result_of`, two results have recalls on different images or captions, or a figure is out of
            date.
    """
    seeds = list(dict.fromkeys(run.seed for runs in experiment.rows.values() for run in runs))
    heads = ["", *(f"seed {seed}" for seed in seeds), "mean", "spread", "R@1 i2t", "R@1 t2i", "MD"]
    heads += ["seconds a run", "CPU seconds a run"]
    lines = [f"| {' | '.join(heads)} |", f"| --- {'| ---: ' * (len(heads) - 1)}|"]
    sums: dict[str, dict[int, dict[str, float] | None]] = {}
    measured: list[dict[str, Any]] = []
    for row, runs in experiment.rows.items():
        found = {run.seed: result_of(experiment, run, results) for run in runs}
        measured += [result for result in found.values() if result is not None]
        sums[row] = {seed: None if result is None else result["test"] for seed, result in found.items()}
        cells = ["" if seed not in found else _sum(found[seed]) for seed in seeds]
        done = [result for result in found.values() if result is not None]
        if any("diverged" in result for result in done):
            cells += [_DIVERGED] * 5
        else:
            cells += _statistics([result["test"] for result in done]) if len(done) == len(found) else [_NOT_RUN] * 5
        cells += [_median([result[name] for result in done]) for name in ("seconds", "cpu_seconds")]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    for name, group in experiment.ensembles_by_name().items():
        found = {ensemble.seed: ensemble_result(experiment, ensemble, results) for ensemble in group}
        cells = ["" if seed not in found else _sum(found[seed]) for seed in seeds]
        done = [result["test"] for result in found.values() if result is not None]
        cells += _statistics(done) if len(done) == len(found) else [_NOT_RUN] * 5
        if None in found:
            seeds_of = {run.seed for run in group[0].members}
            cells[-4] = f"seed{'s' * (len(seeds_of) > 1)} {', '.join(map(str, sorted(seeds_of)))}"
        lines.append(f"| {name} | {' | '.join([*cells, '', ''])} |")
    images = "all images" if experiment.images is None else f"the first {experiment.images} images"
    lines += ["", f"Recalls on {images} of {experiment.split}. {_where(measured)}"]
    lines += _chosen_settings(experiment, results)
    lines += verdicts(experiment, results)
    for first, second in experiment.equal:
        lines += ["", f"{second} equals {first}, recall by recall: {_agreement(sums[first], sums[second])}."]
    for figure in figures_there(experiment, results):
        lines += ["", f"![{figure.text}](../../images/{figure.file})"]
    command = f"python -m benchmarks.experiments run {shown_path(experiment.path)}"
    threads = {result["environment"]["threads"] for result in measured}
    if len(threads) == 1:
        command += f" --threads {threads.pop()}"
    return "\n".join([*lines, "", "Made by:", "", "```", command, "```", ""])


def _chosen_settings(experiment: Experiment, results: Path) -> list[str]:
    """Say which choice of the grid each row uses. Rows without trials of their own follow the row that they copy."""
    firsts = {name: runs[0] for name, runs in experiment.rows.items() if runs[0].trials}
    if experiment.grid is None or not firsts:
        return []
    tried = {trial.file_name: trial for run in firsts.values() for trial in run.trials}
    found = [result for trial in tried.values() if (result := result_of(experiment, trial, results)) is not None]
    chosen = f"Settings were chosen by the sum of recalls on validation, seed {experiment.grid.seed}"
    lines = ["", f"{chosen}{_uncommitted(found)}."]
    lines += ["", "| row | chosen | tried |", "| --- | --- | --- |"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, run in firsts.items():
        groups.setdefault(tuple(trial.file_name for trial in run.trials), []).append(name)
    for owner, *others in groups.values():
        run = firsts[owner]
        lines.append(f"| {owner} | {run.winner or 'not yet'} | {'; '.join(run.choices)} |")
        if others:
            lines.append(f"| {'; '.join(others)} | as {owner} | no others |")
    return lines


def _statistics(summaries: Sequence[Mapping[str, float]]) -> list[str]:
    """Return mean and spread of a row's sums of recalls, its R@1 in both directions, and its mean distance."""
    sums = [summary["rsum"] for summary in summaries]
    spread = f"{statistics.stdev(sums):.1f}" if len(sums) > 1 else "one seed"
    first = [f"{statistics.mean(summary[name] for summary in summaries):.1f}" for name in ("i2t_r1", "t2i_r1")]
    distance = statistics.mean(summary["mean_distance"] for summary in summaries)
    return [f"{statistics.mean(sums):.1f}", spread, *first, f"{distance:.3f}"]


def _sum(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return _NOT_RUN
    return _DIVERGED if "diverged" in result else f"{result['test']['rsum']:.1f}"


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f}" if known else "not known" if values else _NOT_RUN


def _where(results: Sequence[Mapping[str, Any]]) -> str:
    """Describe the machines of the finished runs, their load, and the longest run."""
    if not results:
        return "No run has been measured yet."
    evaluated = [{**result["identity"]["fingerprints"]["evaluation"], "vocab.json": ""} for result in results]
    if any(content != evaluated[0] for content in evaluated):
        raise ValueError("results: expected recalls on the same images and captions, but their content differs")
    environments = [result["environment"] for result in results]
    places = {
        f"{where['processor']} with {where['instruction_set']}, {_threads(where['threads'])}"
        + ("" if result["device"] == "cpu" else f", {result['device']}")
        for result, where in zip(results, environments, strict=True)
    }
    loads = [load for result in results for load in result["load_average"].values()]
    cores = max(where["cores"] for where in environments)
    text = (
        f"Measured on {'; '.join(sorted(places))}{_uncommitted(results)}. The machine's load "
        f"average was {min(loads):.1f} to {max(loads):.1f} with {cores} cores"
    )
    timed = [result for result in results if result["cpu_seconds"] is not None]
    if not timed:
        return f"{text}."
    longest = max(timed, key=lambda result: result["cpu_seconds"])
    clock = f"{longest['seconds']:.0f} by the clock"
    return f"{text}, and the longest run took {longest['cpu_seconds']:.0f} CPU seconds, {clock}."


def _uncommitted(results: Sequence[Mapping[str, Any]]) -> str:
    changed = sum(result["environment"]["uncommitted_changes"] is True for result in results)
    return f", {changed} of {len(results)} runs with uncommitted changes" if changed else ""


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _agreement(first: Mapping[int, Any], second: Mapping[int, Any]) -> str:
    common = [seed for seed in first if seed in second]
    if not common or any(first[seed] is None or second[seed] is None for seed in common):
        return _NOT_RUN
    same = all(first[seed] == second[seed] and math.isfinite(first[seed]["rsum"]) for seed in common)
    return "yes" if same else "NO"


def experiments_of(page: str) -> list[str]:
    """Return the names of the experiments whose tables stand on `page`, in order."""
    return re.findall(r"^<!-- experiment (\S+) -->$", page, flags=re.MULTILINE)


def rendered(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between the markers of an experiment."""
    begin, end = f"<!-- experiment {name} -->\n", f"<!-- end of experiment {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"expected the lines '{begin.strip()}' and '{end}'")
    return f"{head}{begin}\n{text}\n{end}{tail}"
