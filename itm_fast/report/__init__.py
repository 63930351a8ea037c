"""HTML reports: of a run, of one pair, of given scores.

`write_report(path, Report(...))`, `write_pair(path, PairReport(...))`, `write_scores(path, ScoreReport(...))`.
"""

from itm_fast.report.content import (
    Hit,
    ImageQuery,
    MeasureTable,
    PairDirection,
    PairReport,
    Report,
    ScoreReport,
    TextQuery,
    WordAttention,
)
from itm_fast.report.pair import render_pair, write_pair
from itm_fast.report.scores import render_scores, write_scores
from itm_fast.report.write import render_report, write_report

__all__ = [
    "Hit",
    "ImageQuery",
    "MeasureTable",
    "PairDirection",
    "PairReport",
    "Report",
    "ScoreReport",
    "TextQuery",
    "WordAttention",
    "render_pair",
    "render_report",
    "render_scores",
    "write_pair",
    "write_report",
    "write_scores",
]
