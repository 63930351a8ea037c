"""What the results of an experiment say of its claims: differences paired by seed, with intervals.

Inside: `verdicts`, `verdicts_of_papers`, `counted`, `in_short`, `judged`, `interval`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.experiments.ensembles import ensemble_result
from benchmarks.experiments.files import MEASURES, Claim, Ensemble, Experiment
from benchmarks.experiments.results import result_of

__all__ = ["Measured", "Verdict", "counted", "in_short", "interval", "judged", "verdicts", "verdicts_of_papers"]

# 97.5 % quantiles of Student's t by degrees of freedom.
_QUANTILES = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201,
    12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093,
}  # fmt: skip


# Experiments with the folders of their results.
Measured = Sequence[tuple[Experiment, Path]]


@attrs.frozen
class Verdict:
    """What the results say of a claim: differences by seed, and the number of seeds with a run that diverged."""

    claim: Claim
    differences: Sequence[float]
    diverged: int = 0

    @property
    def mean(self) -> float:
        return statistics.mean(self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the mean; None with fewer than two seeds, or if a run diverged."""
        return interval(self.differences) if len(self.differences) > 1 and not self.diverged else None

    @property
    def word(self) -> str:
        """The verdict: holds, fails, open or not run."""
        if not self.differences and not self.diverged:
            return "not run"
        low, high = self.interval or (-math.inf, math.inf)
        return "holds" if low > 0 else "fails" if high < 0 else "open"

    def cells(self) -> list[str]:
        """Return seeds, difference, interval and verdict as the cells of a table."""
        digits = 3 if self.claim.of == "mean_distance" else 1
        seeds = str(len(self.differences))
        shown = f"{self.mean:+.{digits}f}" if self.differences else "diverged" if self.diverged else "not run"
        if self.interval is not None:
            low, high = self.interval
            return [seeds, shown, f"{low:+.{digits}f} to {high:+.{digits}f}", f"**{self.word}**"]
        if not self.differences:
            return [seeds, shown, "", self.word]
        why = f"{self.diverged} seed{'s' * (self.diverged > 1)} diverged" if self.diverged else "one seed"
        return [seeds, shown, why, self.word]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of 2 to 20 normally distributed differences (Student's t)."""
    if len(differences) - 1 not in _QUANTILES:
        raise ValueError(f"claims: expected 2 to {len(_QUANTILES) + 1} seeds, got {len(differences)}")
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
        cells = [claim.text, rows, MEASURES[claim.of], *_verdict(experiment, claim, results).cells()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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
                verdict, cost = _verdict(experiment, claim, results).cells(), _cost(experiment, claim, results)
                cells = [f"[{paper}]({page})", claim.text, MEASURES[claim.of], *verdict, cost]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def counted(papers: Mapping[str, tuple[str, Measured]]) -> str:
    """Render a table of the numbers of claims that hold, fail and are open; `papers` as in `verdicts_of_papers`."""
    lines = ["| paper | claims that hold | that fail | open |", "| --- | ---: | ---: | ---: |"]
    for paper, (page, experiments) in papers.items():
        found = [verdict.word for verdict in judged(experiments)]
        numbers = [str(found.count(verdict)) for verdict in ("holds", "fails", "open")]
        lines.append(f"| [{paper}]({page}) | {' | '.join(numbers)} |")
    return "\n".join([*lines, ""])


def in_short(experiments: Measured) -> str:
    """Return a list of the claims that hold or fail, with their differences, and the numbers of the others."""
    lines: dict[str, list[str]] = {"holds": [], "fails": []}
    others = {"open": 0, "not run": 0}
    for verdict in judged(experiments):
        if verdict.word in others:
            others[verdict.word] += 1
            continue
        seeds, difference, within, _ = verdict.cells()
        measure = "" if verdict.claim.of == "rsum" else f" {MEASURES[verdict.claim.of]}"
        shown = f"{verdict.claim.text}, {difference}{measure} ({within}; {seeds} seeds)"
        lines[verdict.word].append(f"- **{verdict.word.capitalize()}**: {shown}.\n")
    decided = [*lines["holds"], *lines["fails"]]
    other = " other" if decided else ""
    counts = [
        f"- **{verdict.capitalize()}**: {number}{other} claim{'s' * (number > 1)}.\n"
        for verdict, number in others.items()
        if number
    ]
    return "".join([*decided, *counts])


def judged(experiments: Measured) -> list[Verdict]:
    """Return the verdicts on all claims of experiments, in their order."""
    return [_verdict(experiment, claim, results) for experiment, results in experiments for claim in experiment.claims]


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


def _verdict(experiment: Experiment, claim: Claim, results: Path) -> Verdict:
    """Return the verdict on a claim. It stays open if a run that it compares diverged."""
    values: list[dict[int, float]] = []
    diverged: set[int] = set()
    for row in (claim.row, claim.over):
        found = _results(experiment, row, results)
        values.append({seed: result["test"][claim.of] for seed, result in found.items() if result and result["test"]})
        diverged |= {seed for seed, result in found.items() if result and "diverged" in result}
    seeds = sorted(set(values[0]) & set(values[1]))
    return Verdict(claim, [values[0][seed] - values[1][seed] for seed in seeds], len(diverged))
