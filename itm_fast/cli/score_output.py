"""Tables, JSON and rankings of `itm-fast score`.

Inside: `interval_table`, `report_protocol`, `write_rankings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from itm_fast.evaluation.bootstrap import Comparison
    from itm_fast.evaluation.score_protocols import Scored

__all__ = ["interval_table", "report_protocol", "write_rankings"]


def report_protocol(
    result: Scored, other: tuple[str, Scored] | None, *, bootstrap: int, permutations: int, seed: int
) -> tuple[str, dict[str, Any]]:
    """Return the tables of a protocol to print, and its part of the JSON.

    Args:
        result: the result of the scores.
        other: name and result of the second matrix, if there is one.
        bootstrap: number of resamples; 0: no intervals.
        permutations: number of exchanges for p-values.
        seed: of resamples and exchanges.
    """
    from itm_fast.evaluation.bootstrap import compare, intervals
    from itm_fast.evaluation.table import measure_table, recall_table

    content: dict[str, Any] = dict(result.summary)
    if result.rankings:
        rows = {result.name: result.summary, **({} if other is None else {other[0]: other[1].summary})}
        tables = [recall_table(rows)]
    else:
        content["ties"] = "pessimistic"
        tables = [result.name]
    ends = intervals(result.measures, samples=bootstrap, seed=seed) if bootstrap else {}
    if ends:
        content["intervals"] = {name: list(pair) for name, pair in ends.items()}
    if other is not None:
        path, second = other
        compared = compare(result.measures, second.measures, samples=bootstrap, permutations=permutations, seed=seed)
        header = ("measure", "scores", "against", "scores minus against", *["95 % interval"] * bool(bootstrap), "p")
        tables.append(measure_table(header, _rows(compared, intervals=bool(bootstrap))))
        content["against"] = {
            "scores": path,
            **second.summary,
            "differences": {
                name: {
                    "difference": one.difference,
                    **({"interval": [one.lowest, one.highest]} if bootstrap else {}),
                    "p": one.p,
                }
                for name, one in compared.items()
            },
        }
    # The table of recalls shows most measures, but no intervals.
    shown = list(ends if result.rankings else result.summary)
    if other is not None:
        shown = [name for name in shown if name not in result.measures.names]
    if shown:
        tables.append(interval_table(result.summary, ends, shown))
    return "\n".join([*tables, ""]), content


def interval_table(
    values: Mapping[str, float], ends: Mapping[str, tuple[float, float]], names: Sequence[str] | None = None
) -> str:
    """Format measures with their intervals; `names` are those to show, by default all that have an interval."""
    from itm_fast.evaluation.table import measure_table

    cells = [(name, f"{values[name]:.2f}", _interval(ends.get(name))) for name in names or ends]
    return measure_table(("measure", "value", "95 % interval"), cells)


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _rows(compared: Mapping[str, Comparison], *, intervals: bool) -> list[tuple[str, ...]]:
    return [
        (
            name, f"{one.first:.2f}", f"{one.second:.2f}", f"{one.difference:+.2f}",
            *[f"{one.lowest:+.2f} to {one.highest:+.2f}"] * intervals, f"{one.p:.4f}",
        )
        for name, one in compared.items()
    ]  # fmt: skip


def write_rankings(path: Path, results: Sequence[Scored], top: int) -> None:
    """Write the ranks and the `top` best matches of protocols with rankings, as `.npz`."""
    import numpy as np

    from itm_fast.evaluation.ranking import saved_rankings
    from itm_fast.files import atomic

    arrays: dict[str, Any] = {}
    for result in results:
        arrays |= {f"{result.name}_{name}": array for name, array in saved_rankings(result.rankings, top).items()}
    with atomic.atomic_file(path) as file:
        np.savez(file, **arrays)
