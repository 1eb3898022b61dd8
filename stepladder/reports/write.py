"""Put both reports into the run folder."""

from __future__ import annotations

import os
from pathlib import Path

from stepladder.reports.html import html_page
from stepladder.reports.run import read_run
from stepladder.reports.summary import summary_text

REPORT = "report.html"
SUMMARY = "summary.txt"


def write_reports(path: Path) -> str:
    """Write report.html and summary.txt from the logs, and return the summary.

    Raises DataError when `path` is no run folder.
    """
    path = Path(path)
    run = read_run(path)
    summary = summary_text(run, path / REPORT)
    for name, text in ((REPORT, html_page(run)), (SUMMARY, summary)):
        aside = path / f".{name}.new"
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(aside, path / name)
    return summary
