"""HTML reports of a run, `write_report(path, Report(...))`, and of one pair, `write_pair(path, PairReport(...))`."""

from itm_fast.report.content import Hit, ImageQuery, PairDirection, PairReport, Report, TextQuery, WordAttention
from itm_fast.report.pair import render_pair, write_pair
from itm_fast.report.write import render_report, write_report

__all__ = [
    "Hit",
    "ImageQuery",
    "PairDirection",
    "PairReport",
    "Report",
    "TextQuery",
    "WordAttention",
    "render_pair",
    "render_report",
    "write_pair",
    "write_report",
]
