"""HTML pages: of a run, of one pair, of given scores, of search results.

`write_report(path, Report(...))`, `write_pair(path, PairReport(...))`, `write_scores(path, ScoreReport(...))`,
`write_search(path, SearchPage(...))`.
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
from itm_fast.report.search import FoundItem, SearchPage, render_search, write_search
from itm_fast.report.write import render_report, write_report

__all__ = [
    "FoundItem",
    "Hit",
    "ImageQuery",
    "MeasureTable",
    "PairDirection",
    "PairReport",
    "Report",
    "ScoreReport",
    "SearchPage",
    "TextQuery",
    "WordAttention",
    "render_pair",
    "render_report",
    "render_scores",
    "render_search",
    "write_pair",
    "write_report",
    "write_scores",
    "write_search",
]
