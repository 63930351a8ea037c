"""Tables as text: recalls in the layout of papers, and other measures.

Inside: `recall_table`, `measure_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["measure_table", "recall_table"]

_COLUMNS = (("r1", "R@1"), ("r5", "R@5"), ("r10", "R@10"), ("medr", "Med r"), ("meanr", "Mean r"))
_DIRECTIONS = (("i2t", "image to text"), ("t2i", "text to image"))
_DISTANCE = "mean_distance"
_WIDTH = 8
# Mean distances from here on are shown with four digits: scores may have any scale.
_LONG = 1000


def recall_table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """Format recall summaries as a table: two header lines, then one line per summary.

    If a summary has a mean distance, the last column MD shows it with two decimals, or with four digits if
    it is long. All other numbers have one decimal.

    Args:
        summaries: summaries of `itm_fast.functional.recall_summary` or `evaluate`, by row name.

    Returns:
        Lines of equal length, joined by newlines.
    """
    first = max([len(name) for name in summaries] + [0])
    last = ["rsum", *["MD"] * any(_DISTANCE in summary for summary in summaries.values())]
    titles = [*[title for _, title in _COLUMNS] * len(_DIRECTIONS), *last]
    keys = [f"{direction}_{key}" for direction, _ in _DIRECTIONS for key, _ in _COLUMNS]
    rows = []
    for summary in summaries.values():
        cells = [f"{summary[key]:.1f}" for key in [*keys, "rsum"]]
        rows.append(cells + [_distance(summary.get(_DISTANCE))] * (len(last) - 1))
    # A wider column keeps the space in front of a long number.
    widths = [max(_WIDTH, *(len(cell) + 1 for cell in column)) for column in zip(titles, *rows, strict=True)]
    n = len(_COLUMNS)
    groups = [sum(widths[number * n : number * n + n]) for number in range(len(_DIRECTIONS))]
    lines = [
        " " * first
        + "".join(f"  {title:^{group - 2}}" for (_, title), group in zip(_DIRECTIONS, groups, strict=True))
        + " " * sum(widths[n * len(_DIRECTIONS) :])
    ]
    for name, cells in [("", titles), *zip(summaries, rows, strict=True)]:
        lines.append(
            f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)


def _distance(value: float | None) -> str:
    if value is None:
        return ""
    # Adding zero turns -0.0 into 0.0.
    return f"{value:.4g}" if abs(value) >= _LONG else f"{round(value, 2) + 0.0:.2f}"


def measure_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts in columns: the first is aligned to the left, the others to the right.

    Args:
        header: title of each column.
        rows: the cells of each row.

    Returns:
        Lines, joined by newlines.
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for first, *others in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)
