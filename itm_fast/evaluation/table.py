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


def recall_table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """Format recall summaries as a table: two header lines, then one line per summary.

    If a summary has a mean distance, the last column MD shows it with two decimals. All other numbers have one decimal.

    Args:
        summaries: summaries of `itm_fast.functional.recall_summary` or `evaluate`, by row name.

    Returns:
        Lines of equal length, joined by newlines.
    """
    first = max([len(name) for name in summaries] + [0])
    group = _WIDTH * len(_COLUMNS)
    last = ["rsum", *["MD"] * any(_DISTANCE in summary for summary in summaries.values())]
    titles = [*[title for _, title in _COLUMNS] * len(_DIRECTIONS), *last]
    lines = [
        " " * first + "".join(f"  {title:^{group - 2}}" for _, title in _DIRECTIONS) + " " * _WIDTH * len(last),
        " " * first + "".join(f"{title:>{_WIDTH}}" for title in titles),
    ]
    for name, summary in summaries.items():
        keys = [f"{direction}_{key}" for direction, _ in _DIRECTIONS for key, _ in _COLUMNS]
        cells = [f"{summary[key]:.1f}" for key in [*keys, "rsum"]]
        # Adding zero turns -0.0 into 0.0.
        cells += [f"{round(summary[_DISTANCE], 2) + 0.0:.2f}" if _DISTANCE in summary else ""] * (len(last) - 1)
        lines.append(f"{name:<{first}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    return "\n".join(lines)


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
