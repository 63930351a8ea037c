"""What the results of an experiment say of its claims: differences paired by seed, with intervals.

Inside: `verdicts`, `verdicts_of_papers`, `counted`, `in_short`, `interval`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.ensembles import ensemble_result
from benchmarks.experiments.files import MEASURES, Claim, Ensemble, Experiment
from benchmarks.experiments.results import result_of

__all__ = ["counted", "in_short", "interval", "verdicts", "verdicts_of_papers"]

# 97.5 % quantiles of Student's t by degrees of freedom.
_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of up to ten normally distributed differences (Student's t)."""
    mean = statistics.mean(differences)
    width = _QUANTILES[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean - width, mean + width


def verdicts(experiment: Experiment, results: Path) -> list[str]:
    """Return the lines of a table with one claim a row; none without claims."""
    if not experiment.claims:
        return []
    heads = ["claim", "rows", "by", "seeds", "paired difference", "95 % interval", "verdict"]
    lines = ["", f"| {' | '.join(heads)} |", "| --- | --- | --- | ---: | ---: | ---: | --- |"]
    for claim in experiment.claims:
        rows = f"{claim.row} minus {claim.over}"
        cells = [claim.text, rows, MEASURES[claim.of], *_verdict(experiment, claim, results)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# Experiments with the folders of their results.
Measured = Sequence[tuple[Experiment, Path]]


def verdicts_of_papers(papers: Mapping[str, tuple[str, Measured]]) -> str:
    """Render one table of the claims of several papers.

    Args:
        papers: by the name of each paper the address of its page, and its experiments.
    """
    heads = ["paper", "claim", "by", "seeds", "paired difference", "95 % interval", "verdict", "CPU time"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | ---: | ---: | ---: | --- | ---: |"]
    for paper, (page, experiments) in papers.items():
        for experiment, results in experiments:
            for claim in experiment.claims:
                verdict, cost = _verdict(experiment, claim, results), _cost(experiment, claim, results)
                cells = [f"[{paper}]({page})", claim.text, MEASURES[claim.of], *verdict, cost]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def counted(papers: Mapping[str, tuple[str, Measured]]) -> str:
    """Render a table of the numbers of claims that hold, fail and are open; `papers` as in `verdicts_of_papers`."""
    lines = ["| paper | claims that hold | that fail | open |", "| --- | ---: | ---: | ---: |"]
    for paper, (page, experiments) in papers.items():
        found = [verdict[-1].strip("*") for _, verdict in _verdicts(experiments)]
        numbers = [str(found.count(verdict)) for verdict in ("holds", "fails", "open")]
        lines.append(f"| [{paper}]({page}) | {' | '.join(numbers)} |")
    return "\n".join([*lines, ""])


def in_short(experiments: Measured) -> str:
    """Return a list of the claims that hold or fail, with their differences, and the numbers of the others."""
    lines: dict[str, list[str]] = {"holds": [], "fails": []}
    others = {"open": 0, "not run": 0}
    for claim, (seeds, difference, interval, cell) in _verdicts(experiments):
        verdict = cell.strip("*")
        if verdict in others:
            others[verdict] += 1
            continue
        measure = "" if claim.of == "rsum" else f" {MEASURES[claim.of]}"
        shown = f"{claim.text}, {difference}{measure} ({interval}; {seeds} seeds)"
        lines[verdict].append(f"- **{verdict.capitalize()}**: {shown}.\n")
    decided = [*lines["holds"], *lines["fails"]]
    other = " other" if decided else ""
    counts = [
        f"- **{verdict.capitalize()}**: {number}{other} claim{'s' * (number > 1)}.\n"
        for verdict, number in others.items()
        if number
    ]
    return "".join([*decided, *counts])


def _verdicts(experiments: Measured) -> list[tuple[Claim, list[str]]]:
    return [
        (claim, _verdict(experiment, claim, results))
        for experiment, results in experiments
        for claim in experiment.claims
    ]


def _cost(experiment: Experiment, claim: Claim, results: Path) -> str:
    """Return the CPU time of a run, compared with that of the row it is claimed to improve.

    It is the median over the seeds whose two runs had the same processor and instruction set.
    """
    times: list[dict[tuple[int, str, str], float]] = []
    for row in (claim.row, claim.over):
        # Ensembles have no time of a run.
        found = {run.seed: result_of(experiment, run, results) for run in experiment.rows.get(row, [])}
        # A run that was interrupted has no time.
        measured = {seed: result for seed, result in found.items() if result is not None and result["cpu_seconds"]}
        times.append({(seed, *_machine(result)): result["cpu_seconds"] for seed, result in measured.items()})
    ratios = [times[0][key] / times[1][key] for key in set(times[0]) & set(times[1])]
    return f"{statistics.median(ratios):.1f}x" if ratios else ""


def _machine(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["environment"]["processor"], result["environment"]["instruction_set"]


def _results(experiment: Experiment, row: str, results: Path) -> dict[int, dict[str, Any] | None]:
    if row in experiment.rows:
        return {run.seed: result_of(experiment, run, results) for run in experiment.rows[row]}
    group = experiment.ensembles_by_name()[row]
    return {one.seed: _of_ensemble(experiment, one, results) for one in group if one.seed is not None}


def _of_ensemble(experiment: Experiment, ensemble: Ensemble, results: Path) -> dict[str, Any] | None:
    """Return the result of an ensemble, or that of a run in it that diverged: then the ensemble is not evaluated."""
    members = (result_of(experiment, run, results) for run in ensemble.members)
    diverged = (member for member in members if member is not None and "diverged" in member)
    return next(diverged, None) or ensemble_result(experiment, ensemble, results)


def _verdict(experiment: Experiment, claim: Claim, results: Path) -> list[str]:
    """Return seeds, difference, interval and verdict. A claim stays open if a run that it compares diverged."""
    values: list[dict[int, float]] = []
    diverged: set[int] = set()
    for row in (claim.row, claim.over):
        found = _results(experiment, row, results)
        values.append({seed: result["test"][claim.of] for seed, result in found.items() if result and result["test"]})
        diverged |= {seed for seed, result in found.items() if result and "diverged" in result}
    seeds = sorted(set(values[0]) & set(values[1]))
    if not seeds:
        return ["0", "diverged", "", "open"] if diverged else ["0", "not run", "", "not run"]
    differences = [values[0][seed] - values[1][seed] for seed in seeds]
    digits = 3 if claim.of == "mean_distance" else 1
    shown = f"{statistics.mean(differences):+.{digits}f}"
    if diverged:
        return [str(len(seeds)), shown, f"{len(diverged)} seed{'s' * (len(diverged) > 1)} diverged", "open"]
    if len(seeds) < 2:
        return ["1", shown, "one seed", "open"]
    low, high = interval(differences)
    verdict = "holds" if low > 0 else "fails" if high < 0 else "open"
    return [str(len(seeds)), shown, f"{low:+.{digits}f} to {high:+.{digits}f}", f"**{verdict}**"]
