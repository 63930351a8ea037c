"""The HTML report of a run: `write_report(path, Report(...))`."""

from itm_fast.report.content import Hit, ImageQuery, Report, TextQuery, WordAttention
from itm_fast.report.write import render_report, write_report

__all__ = ["Hit", "ImageQuery", "Report", "TextQuery", "WordAttention", "render_report", "write_report"]
